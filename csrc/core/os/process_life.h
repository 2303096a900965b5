#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "core/os/fd.h"
#include "core/os/shared_memory.h"

namespace gpumode::os {

// The life of this process as a word in shared memory, which the kernel marks when the process
// begins to die, whatever kills it (a robust futex). That is before its memory is freed, and long
// before a pidfd or a socket tells: freeing takes 0.2 ms per MiB on a busy machine, so a rank with
// a model in memory would be missed for hundreds of milliseconds.
//
// Where the kernel cannot wait for several words (before Linux 5.16, some sandboxes) the other
// signs remain.
class ProcessLife {
 public:
  struct Word;

  // The one of this process, started by the first call; a forked child has its own.
  static ProcessLife& instance();

  // What others map to watch this process: see map. Empty if this process cannot be watched.
  const Fd& fd() const;
  // Maps the word of another process.
  static Status map(const Fd& fd, SharedMemory* memory);

  // Calls `on_death` once when the process behind the word dies, from a thread of ours. A watch
  // that has ended calls nothing more, but a call may be on its way.
  uint64_t watch(const SharedMemory& life, std::function<void()> on_death);
  void unwatch(uint64_t id);

 private:
  ProcessLife();
  struct State;
  State* const state_;  // lives as long as the process: our thread uses it
};

}  // namespace gpumode::os
