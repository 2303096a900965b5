#include "core/os/socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cassert>
#include <cstring>

#include "core/os/error.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; older headers do not name it
#endif

namespace gpumode::os {
namespace {

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr size_t kMaxFds = 4;

Status address_of(const std::string& name, sockaddr_un* address, socklen_t* length) {
  if (name.empty() || name.size() + 1 > sizeof(address->sun_path)) {
    return {Code::InvalidArgument,
            "socket name of " + std::to_string(name.size()) + " characters; expected 1 to 107"};
  }
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // a leading 0: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return {};
}

// PeerLost where the reason lies with the peer: it is not there (any more).
Status peer_error(const std::string& call) {
  const bool gone = errno == ECONNREFUSED || errno == ECONNRESET || errno == EPIPE;
  Status status = last_error(call);
  if (gone) status.code = Code::PeerLost;
  return status;
}

}  // namespace

Status listen_local(const std::string& name, Fd* listener) {
  sockaddr_un address{};
  socklen_t length = 0;
  if (Status s = address_of(name, &address, &length); !s.ok()) return s;
  Fd fd(::socket(AF_UNIX, kSocketType, 0), true);
  if (!fd) return last_error("socket");
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return last_error("bind");
  }
  if (::listen(fd.get(), SOMAXCONN) != 0) return last_error("listen");
  *listener = std::move(fd);
  return {};
}

Status connect_local(const std::string& name, Fd* socket) {
  sockaddr_un address{};
  socklen_t length = 0;
  if (Status s = address_of(name, &address, &length); !s.ok()) return s;
  Fd fd(::socket(AF_UNIX, kSocketType, 0), true);
  if (!fd) return last_error("socket");
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return peer_error("connect");
  }
  *socket = std::move(fd);
  return {};
}

Status accept_local(const Fd& listener, Fd* socket) {
  Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK), true);
  if (!fd && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    return last_error("accept");
  }
  *socket = std::move(fd);
  return {};
}

Status send_message(const Fd& socket, const void* data, size_t nbytes,
                    const std::vector<int>& fds) {
  assert(fds.size() <= kMaxFds);
  iovec io{const_cast<void*>(data), nbytes};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  // The socket's buffer holds the few small messages that we ever send, so this never blocks.
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(nbytes)) {
    return peer_error("sendmsg");
  }
  return {};
}

Status receive_message(const Fd& socket, void* data, size_t nbytes, Received* received) {
  iovec io{data, nbytes};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  *received = {};
  const ssize_t n = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  if (n < 0 && errno == ECONNRESET) {
    received->nbytes = 0;
    return {};
  }
  if (n < 0) return last_error("recvmsg");
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      received->fds.emplace_back(fd);
    }
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return {Code::Internal, "a message on a local socket is longer than this version expects"};
  }
  received->nbytes = n;
  return {};
}

Status peer_credentials(const Fd& socket, PeerCredentials* credentials) {
  ucred cred{};
  socklen_t length = sizeof(cred);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &cred, &length) != 0) {
    return last_error("getsockopt(SO_PEERCRED)");
  }
  *credentials = {cred.pid, cred.uid};
  return {};
}

Fd peer_pidfd(const Fd& socket, pid_t pid) {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return Fd(fd);
#ifdef SYS_pidfd_open
  if (pid > 0) return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  return {};
}

std::string random_hex(size_t nbytes) {
  static const char* digits = "0123456789abcdef";
  std::string bytes(nbytes, '\0');
  size_t have = 0;
  while (have < nbytes) {
    const ssize_t n = ::getrandom(bytes.data() + have, nbytes - have, 0);
    if (n > 0) have += static_cast<size_t>(n);
  }
  std::string hex;
  hex.reserve(2 * nbytes);
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    hex += digits[byte >> 4];
    hex += digits[byte & 15];
  }
  return hex;
}

}  // namespace gpumode::os
