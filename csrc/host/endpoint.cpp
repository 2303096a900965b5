#include "host/endpoint.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "core/os/process_life.h"
#include "core/os/socket.h"

namespace gpumode::host {
namespace {

constexpr uint32_t kMagic = 0x474d4f44;
constexpr uint32_t kVersion = 1;
constexpr size_t kMaxEarly = 1024, kMaxSilent = 1024;

struct Hello {
  uint32_t magic;
  uint32_t version;
  int64_t uuid;
  int32_t from;
  int32_t size;
  char token[32];  // of the endpoint that is spoken to
};

constexpr char kReady = 'R';

// Two processes with the same name here can meet on an abstract socket.
std::string host_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ns{};
  if (::stat("/proc/self/ns/net", &ns) == 0) boot += "-" + std::to_string(ns.st_ino);
  return boot;
}

}  // namespace

Status Address::parse(const std::string& handle, Address* address) {
  // gpumode1/<rank>/<host>/<socket>/<token>
  std::vector<std::string> fields;
  size_t begin = 0;
  while (fields.size() < 6) {
    const size_t end = handle.find('/', begin);
    fields.push_back(handle.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  if (fields.size() != 5 || fields[0] != "gpumode1" || fields[3].empty() ||
      fields[4].size() != sizeof(Hello::token)) {
    return {Code::InvalidArgument, "handles: \"" + handle.substr(0, 80) +
                                       "\" is not a handle of this version; expected what "
                                       "get_reconfigure_handle returned on a member"};
  }
  *address = {static_cast<int>(std::strtol(fields[1].c_str(), nullptr, 10)), fields[2], fields[3],
              fields[4]};
  return {};
}

Status Endpoint::open(int initial_rank, Endpoint* endpoint) {
  Endpoint made;
  made.address_ = {initial_rank, host_name(), "torch_gpumode-" + os::random_hex(8),
                   os::random_hex(16)};
  if (Status s = os::listen_local(made.address_.socket, &made.listener_); !s.ok()) return s;
  char rank[16];
  std::snprintf(rank, sizeof(rank), "%08d", initial_rank);
  made.handle_ = std::string("gpumode1/") + rank + "/" + made.address_.host + "/" +
                 made.address_.socket + "/" + made.address_.token;
  *endpoint = std::move(made);
  return {};
}

Status Endpoint::check(const std::string& handle) {
  Address address;
  if (Status s = Address::parse(handle, &address); !s.ok()) return s;
  if (address.host == host_name()) return {};
  return {Code::InvalidArgument, "handles: \"" + handle.substr(0, 80) +
                                     "\" is of another host or network namespace; this engine "
                                     "connects ranks of one host"};
}

int Endpoint::initial_rank(const std::string& handle) {
  Address address;
  return Address::parse(handle, &address).ok() ? address.initial_rank : -1;
}

bool Endpoint::reachable(const std::string& handle) {
  Address address;
  os::Fd socket;
  return Address::parse(handle, &address).ok() &&
         os::connect_local(address.socket, &socket).code != Code::PeerLost;
}

// One try to meet the members of one epoch. Every member connects to every other and hands over
// its descriptors there; of the two connections of a pair the one that the higher rank made stays.
class Handshake {
 public:
  Handshake(Endpoint& endpoint, const Membership& membership, int rank, const os::Fd& segment,
            const os::Fd& bell)
      : endpoint_(endpoint),
        membership_(membership),
        rank_(rank),
        size_(static_cast<int>(membership.handles.size())),
        fds_{segment.get(), bell.get()},
        peers_(membership.handles.size()) {
    const os::Fd& life = os::ProcessLife::instance().fd();
    if (life) fds_.push_back(life.get());
  }

  Status run(TimePoint deadline, std::vector<Link>* links) {
    for (int q = 0; q < size_; ++q) {
      if (q == rank_) continue;
      if (Status s = call(q); !s.ok()) return s;
    }
    std::vector<Endpoint::Early> early;
    early.swap(endpoint_.early_);
    for (auto& e : early) {
      if (Status s = take(std::move(e)); !s.ok()) return s;
    }
    while (!done()) {
      if (Clock::now() >= deadline) return timed_out();
      if (Status s = wait_and_read(deadline); !s.ok()) return s;
      if (!said_ready_ && count_missing(&Peer::linked) == 0) {
        if (Status s = say_ready(); !s.ok()) return s;
      }
    }
    hand_over(links);
    return {};
  }

 private:
  struct Peer {
    os::Fd out, in;  // the connection that we made, and the peer's
    bool linked = false, ready = false;
    Link link;
  };

  bool done() const { return size_ == 1 || (said_ready_ && count_missing(&Peer::ready) == 0); }

  int count_missing(bool Peer::* what) const {
    int missing = 0;
    for (int q = 0; q < size_; ++q) missing += q != rank_ && !(peers_[q].*what);
    return missing;
  }

  Status lost(int q) const {
    return {
        Code::PeerLost, "rank " + std::to_string(q) + " went away while the group was built", {q}};
  }

  // A connection of a member that is not ready has ended: it is dead, or has given up this try.
  Status closed(int q) const {
    if (!Endpoint::reachable(membership_.handles[q])) return lost(q);
    return {Code::Timeout, "rank " + std::to_string(q) + " gave up building the group", {q}};
  }

  Status timed_out() const {
    std::vector<int> missing;
    for (int q = 0; q < size_; ++q) {
      if (q != rank_ && !(said_ready_ ? peers_[q].ready : peers_[q].linked)) missing.push_back(q);
    }
    return {Code::Timeout,
            "the group was not built in time: still waiting for " + name_ranks(missing), missing};
  }

  // Connects to `q` and hands over our descriptors.
  Status call(int q) {
    Address address;
    if (Status s = Address::parse(membership_.handles[q], &address); !s.ok()) return s;
    if (address.host != endpoint_.address_.host) {
      return {Code::InvalidArgument, "rank " + std::to_string(q) +
                                         " runs on another host or in another network "
                                         "namespace than rank " +
                                         std::to_string(rank_) +
                                         "; this engine connects ranks of one host"};
    }
    Status status = os::connect_local(address.socket, &peers_[q].out);
    if (!status.ok()) return status.code == Code::PeerLost ? lost(q) : status;
    Hello hello{kMagic, kVersion, membership_.uuid, rank_, size_, {}};
    std::memcpy(hello.token, address.token.data(), sizeof(hello.token));
    status = os::send_message(peers_[q].out, &hello, sizeof(hello), fds_);
    return status.code == Code::PeerLost ? lost(q) : status;
  }

  Status say_ready() {
    said_ready_ = true;
    for (int q = 0; q < size_; ++q) {
      if (q == rank_) continue;
      const Status status = os::send_message(peers_[q].out, &kReady, 1, {});
      if (!status.ok() && !peers_[q].ready) {
        return status.code == Code::PeerLost ? lost(q) : status;
      }
    }
    return {};
  }

  Status wait_and_read(TimePoint deadline) {
    polled_.clear();
    polled_.push_back({endpoint_.listener_.get(), POLLIN, 0});
    for (const auto& socket : endpoint_.silent_) polled_.push_back({socket.get(), POLLIN, 0});
    for (int q = 0; q < size_; ++q) {
      // Once a peer is ready it may be done, and close the connections that it does not keep.
      if (q == rank_ || peers_[q].ready) continue;
      polled_.push_back({peers_[q].out.get(), POLLIN, 0});
      if (peers_[q].in) polled_.push_back({peers_[q].in.get(), POLLIN, 0});
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    ::poll(polled_.data(), polled_.size(),
           static_cast<int>(std::min<int64_t>(left.count() + 1, 1000)));

    for (;;) {
      os::Fd socket;
      if (Status s = os::accept_local(endpoint_.listener_, &socket); !s.ok()) return s;
      if (!socket) break;
      endpoint_.silent_.push_back(std::move(socket));
    }
    std::vector<os::Fd> strangers;
    strangers.swap(endpoint_.silent_);
    for (auto& socket : strangers) {
      if (Status s = read_hello(std::move(socket)); !s.ok()) return s;
    }
    for (int q = 0; q < size_; ++q) {
      if (q == rank_ || peers_[q].ready) continue;
      if (Status s = read_ready(q); !s.ok()) return s;
    }
    return {};
  }

  Status read_hello(os::Fd socket) {
    Hello hello{};
    os::Received received;
    if (!os::receive_message(socket, &hello, sizeof(hello), &received).ok()) return {};
    if (received.nbytes < 0) {
      if (endpoint_.silent_.size() < kMaxSilent) endpoint_.silent_.push_back(std::move(socket));
      return {};
    }
    const bool genuine = received.nbytes == sizeof(hello) && hello.magic == kMagic &&
                         hello.version == kVersion && received.fds.size() >= 2 &&
                         endpoint_.address_.token.compare(0, std::string::npos, hello.token,
                                                          sizeof(hello.token)) == 0;
    if (!genuine) return {};  // closes it
    return take({std::move(socket), hello.uuid, hello.from, std::move(received.fds)});
  }

  // A genuine connection: of this membership, or of one that we have not been told of yet.
  Status take(Endpoint::Early early) {
    if (early.uuid != membership_.uuid) {
      pollfd fd{early.socket.get(), 0, 0};
      const bool closed = ::poll(&fd, 1, 0) > 0 && (fd.revents & POLLHUP) != 0;
      if (!closed && endpoint_.early_.size() < kMaxEarly) {
        endpoint_.early_.push_back(std::move(early));
      }
      return {};
    }
    if (early.from < 0 || early.from >= size_ || early.from == rank_ || peers_[early.from].linked) {
      return {Code::InvalidArgument,
              "two members call themselves rank " + std::to_string(early.from) +
                  "; expected each handle once, in the same order on every member"};
    }
    Peer& peer = peers_[early.from];
    if (Status s = Segment::map(early.fds[0], size_, &peer.link.segment); !s.ok()) return s;
    Status s = os::SharedMemory::map(early.fds[1], sizeof(Bell), true, &peer.link.bell);
    if (!s.ok()) return s;
    if (early.fds.size() > 2) {
      if (s = os::ProcessLife::map(early.fds[2], &peer.link.life); !s.ok()) return s;
    }
    peer.in = std::move(early.socket);
    peer.linked = true;
    return {};
  }

  Status read_ready(int q) {
    if (Status s = read_in(q); !s.ok() || peers_[q].ready) return s;
    // Nothing is ever sent to us on the connection that we made: readable means closed. If that is
    // because the peer is done, it said before that it is ready, perhaps since we looked.
    char byte = 0;
    os::Received received;
    if (Status s = os::receive_message(peers_[q].out, &byte, 1, &received); !s.ok()) return s;
    if (received.nbytes != 0) return {};
    if (Status s = read_in(q); !s.ok() || peers_[q].ready) return s;
    return closed(q);
  }

  Status read_in(int q) {
    Peer& peer = peers_[q];
    if (!peer.in) return {};
    char byte = 0;
    os::Received received;
    if (Status s = os::receive_message(peer.in, &byte, 1, &received); !s.ok()) return s;
    if (received.nbytes == 0) return closed(q);
    peer.ready = received.nbytes == 1 && byte == kReady;
    return {};
  }

  void hand_over(std::vector<Link>* links) {
    links->clear();
    for (int q = 0; q < size_; ++q) {
      Link& link = links->emplace_back();
      if (q == rank_) continue;
      link = std::move(peers_[q].link);
      link.socket = std::move(q > rank_ ? peers_[q].in : peers_[q].out);
      os::PeerCredentials peer;
      if (os::peer_credentials(link.socket, &peer).ok() && peer.pid == ::getpid()) {
        link.life = {};
      } else {
        link.pidfd = os::peer_pidfd(link.socket, peer.pid);
      }
    }
  }

  Endpoint& endpoint_;
  const Membership& membership_;
  const int rank_, size_;
  std::vector<int> fds_;  // segment, bell, and the process's life if it has a word
  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;
  bool said_ready_ = false;
};

Status Endpoint::connect(const Membership& membership, int rank, const os::Fd& segment,
                         const os::Fd& bell, TimePoint deadline, std::vector<Link>* links) {
  return Handshake(*this, membership, rank, segment, bell).run(deadline, links);
}

}  // namespace gpumode::host
