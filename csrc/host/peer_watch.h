#pragma once

#include <cstdint>
#include <functional>

#include "core/os/fd.h"

namespace gpumode::host {

// One thread of this process that notices dead peers at once: it sleeps until a socket to a peer
// closes, or a peer's pidfd turns readable. The pidfd is what counts where the dead peer left
// children that still hold its sockets.
class PeerWatch {
 public:
  static PeerWatch& instance();

  // Calls `on_gone` once, from the watching thread, when `socket` closes or `pidfd` (may be empty)
  // says that the process died. Both stay the caller's until remove() has returned.
  uint64_t add(int socket, int pidfd, std::function<void()> on_gone);
  // On return the callback does not run and will not.
  void remove(uint64_t id);

 private:
  PeerWatch() = default;
  struct State;
  State& state();
};

}  // namespace gpumode::host
