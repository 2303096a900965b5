#pragma once

#include <cstddef>
#include <memory>

#include "core/os/fd.h"
#include "core/status.h"

namespace gpumode::os {

// Memory shared between processes, without a name in any file system: it is gone with the last
// process that maps it, however that process ends.
//
// A process maps the same memory once: ranks that are threads of one process share addresses, so
// that ThreadSanitizer sees their races.
class SharedMemory {
 public:
  // Creates zeroed memory and maps it; `fd` is what other processes map it by. Pages cost memory
  // only once they are touched.
  static Status create(size_t nbytes, SharedMemory* memory, Fd* fd);
  // Maps memory of another process; fails if it is smaller than `nbytes`.
  static Status map(const Fd& fd, size_t nbytes, bool writable, SharedMemory* memory);

  std::byte* data() const;
  explicit operator bool() const { return mapping_ != nullptr; }

 private:
  struct Mapping;
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace gpumode::os
