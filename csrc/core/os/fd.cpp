#include "core/os/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace gpumode::os {
namespace {

// The descriptors to close in a forked child. Never destroyed: descriptors may be closed by
// destructors that run after ours at exit.
struct ForkGuard {
  std::mutex mutex;
  std::set<int> fds;
};

ForkGuard& fork_guard() {
  static ForkGuard* guard = [] {
    auto* g = new ForkGuard;
    pthread_atfork([] { fork_guard().mutex.lock(); }, [] { fork_guard().mutex.unlock(); },
                   [] {
                     for (int fd : fork_guard().fds) ::close(fd);
                     fork_guard().fds.clear();
                     fork_guard().mutex.unlock();
                   });
    return g;
  }();
  return *guard;
}

}  // namespace

Fd::Fd(int fd, bool close_on_fork) : fd_(fd), guarded_(close_on_fork && fd >= 0) {
  if (!guarded_) return;
  std::lock_guard<std::mutex> lock(fork_guard().mutex);
  fork_guard().fds.insert(fd);
}

Fd& Fd::operator=(Fd&& o) noexcept {
  if (this != &o) {
    reset();
    fd_ = std::exchange(o.fd_, -1);
    guarded_ = std::exchange(o.guarded_, false);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  if (guarded_) {
    std::lock_guard<std::mutex> lock(fork_guard().mutex);
    // In a forked child the number is closed already, and may be somebody else's by now.
    if (fork_guard().fds.erase(fd_) != 0) ::close(fd_);
  } else {
    ::close(fd_);
  }
  fd_ = -1;
  guarded_ = false;
}

}  // namespace gpumode::os
