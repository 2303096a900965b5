#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/os/fd.h"
#include "core/status.h"

namespace gpumode::os {

// Unix sockets of this host that keep message boundaries, in the abstract namespace (no file to
// leave behind), non-blocking, closed on exec and on fork.
Status listen_local(const std::string& name, Fd* listener);
// PeerLost if nobody listens.
Status connect_local(const std::string& name, Fd* socket);
// No connection waiting: Ok with an empty socket.
Status accept_local(const Fd& listener, Fd* socket);

// Sends one message with descriptors attached; PeerLost if the peer has closed.
Status send_message(const Fd& socket, const void* data, size_t nbytes, const std::vector<int>& fds);

struct Received {
  ssize_t nbytes = -1;  // -1: nothing there yet; 0: the peer has closed
  std::vector<Fd> fds;
};
// Takes one message of at most `nbytes`; a longer one is an error.
Status receive_message(const Fd& socket, void* data, size_t nbytes, Received* received);

struct PeerCredentials {
  pid_t pid = 0;  // 0: in a process namespace that is not visible from here
  uid_t uid = 0;
};
Status peer_credentials(const Fd& socket, PeerCredentials* credentials);

// A descriptor that turns readable when the process behind the socket has died; empty where the
// kernel or the sandbox gives none.
Fd peer_pidfd(const Fd& socket, pid_t pid);

// `nbytes` of randomness from the kernel, in hex.
std::string random_hex(size_t nbytes);

}  // namespace gpumode::os
