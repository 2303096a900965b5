#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "core/os/fd.h"
#include "core/os/shared_memory.h"
#include "host/segment.h"

namespace gpumode::host {

// What a member keeps of one peer: closing `socket` ends the peer's belief that we are alive.
struct Link {
  os::Fd socket;
  // Both empty where the system gives none, or the peer is in this process.
  os::Fd pidfd;
  os::SharedMemory life;
  Segment segment;
  os::SharedMemory bell;
};

// A handle, taken apart. It is text that went through a store, so nothing in it is trusted.
struct Address {
  int initial_rank = -1;
  std::string host;    // of the running kernel and its network namespace
  std::string socket;  // name in the abstract namespace
  std::string token;   // known to those who read the handle; a connection must show it

  static Status parse(const std::string& handle, Address* address);
};

// Where peers of this host reach an engine, for its whole life and across epochs.
class Endpoint {
 public:
  // `initial_rank` only makes handles sort in rank order.
  static Status open(int initial_rank, Endpoint* endpoint);

  const std::string& handle() const { return handle_; }
  // -1 if it is no handle.
  static int initial_rank(const std::string& handle);
  // False if nobody listens behind the handle any more: its process is dead, or its group
  // destroyed. Each call costs the other side a descriptor until it connects to a membership the
  // next time.
  static bool reachable(const std::string& handle);
  // InvalidArgument if it is no handle, or one of another host.
  static Status check(const std::string& handle);

  // Meets all other members, hands each our segment and bell, and takes theirs. Returns once
  // everybody has everything, so that it fails on all members or on none, but for a member that
  // dies in the last moment. PeerLost at once if a member dies or closed its endpoint.
  // (*links)[rank] stays empty.
  Status connect(const Membership& membership, int rank, const os::Fd& segment, const os::Fd& bell,
                 TimePoint deadline, std::vector<Link>* links);

 private:
  friend class Handshake;
  // A connection that came before we knew the membership that it names.
  struct Early {
    os::Fd socket;
    int64_t uuid = 0;
    int from = 0;
    std::vector<os::Fd> fds;
  };

  std::string handle_;
  Address address_;
  os::Fd listener_;
  std::vector<Early> early_;
  // Connected, and have not said yet to which membership: it may be one that we are told of later.
  std::vector<os::Fd> silent_;
};

}  // namespace gpumode::host
