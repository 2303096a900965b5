#pragma once

#include <cstdint>
#include <functional>

#include "core/channel.h"
#include "core/os/shared_memory.h"

namespace gpumode::host {

// Notices dead peers at once, without anybody's polling. There are three signs, and the first
// counts: the word of the peer's life (see ProcessLife), which comes at once; its pidfd, which
// comes when its memory is freed; and the end of a socket to it, which may come only after all
// children that have inherited it are gone, but also comes when the peer leaves a group and lives
// on.
class PeerWatch {
 public:
  static PeerWatch& instance();

  // Calls `on_gone` once, from a thread of ours: with Dead when `pidfd` or `life` (either may be
  // empty) says that the process died, with Left when `socket` closes. All stay the caller's until
  // remove() has returned.
  uint64_t add(int socket, int pidfd, const os::SharedMemory& life,
               std::function<void(Presence)> on_gone);
  // On return the callback does not run and will not.
  void remove(uint64_t id);

 private:
  PeerWatch() = default;
  struct State;
  State& state();
};

}  // namespace gpumode::host
