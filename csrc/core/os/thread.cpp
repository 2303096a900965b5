#include "core/os/thread.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace gpumode::os {

std::thread start_thread(const char* name, std::function<void()> body) {
  // A new thread inherits the mask of its creator, so there is no moment without it.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace gpumode::os
