#include "core/os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "core/os/error.h"

namespace gpumode::os {

struct SharedMemory::Mapping {
  Mapping(void* data, size_t nbytes) : data(data), nbytes(nbytes) {}
  ~Mapping() { ::munmap(data, nbytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* const data;
  const size_t nbytes;
};

std::byte* SharedMemory::data() const { return static_cast<std::byte*>(mapping_->data); }

Status SharedMemory::create(size_t nbytes, SharedMemory* memory, Fd* fd) {
  Fd created(::memfd_create("torch_gpumode", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!created) return last_error("memfd_create");
  if (::ftruncate(created.get(), static_cast<off_t>(nbytes)) != 0) return last_error("ftruncate");
  // A peer that shrank the memory would make every reader die of SIGBUS.
  if (::fcntl(created.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return last_error("fcntl(F_ADD_SEALS)");
  }
  Status status = map(created, nbytes, true, memory);
  if (status.ok()) *fd = std::move(created);
  return status;
}

Status SharedMemory::map(const Fd& fd, size_t nbytes, bool writable, SharedMemory* memory) {
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return last_error("fstat");
  if (static_cast<size_t>(info.st_size) < nbytes) {
    return {Code::Internal, "shared memory of a peer is smaller than this version expects"};
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return {Code::Internal, "shared memory of a peer is not sealed against shrinking"};
  }

  // Never destroyed: mappings may be released by destructors that run at exit.
  static auto* mutex = new std::mutex;
  static auto* mappings = new std::map<ino_t, std::weak_ptr<Mapping>>;
  std::lock_guard<std::mutex> lock(*mutex);
  for (auto it = mappings->begin(); it != mappings->end();) {
    it = it->second.expired() ? mappings->erase(it) : std::next(it);
  }
  if (auto it = mappings->find(info.st_ino); it != mappings->end()) {
    memory->mapping_ = it->second.lock();
    if (memory->mapping_) return {};
  }
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  void* data = ::mmap(nullptr, nbytes, protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return last_error("mmap");
  // A forked child must not be able to speak for its parent.
  ::madvise(data, nbytes, MADV_DONTFORK);
  memory->mapping_ = std::make_shared<Mapping>(data, nbytes);
  (*mappings)[info.st_ino] = memory->mapping_;
  return {};
}

}  // namespace gpumode::os
