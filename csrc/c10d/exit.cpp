#include "c10d/exit.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "c10d/fork.h"

namespace gpumode {
namespace {

struct Exit {
  std::mutex mutex;  // guards what follows
  std::condition_variable cv;
  int num_inside = 0;
  std::thread::id exiting_thread;
  std::atomic<bool> holding{false};  // also read without the lock
};

Exit& state() {
  static auto* exit = [] {
    auto* made = new Exit;  // used during exit
    survive_fork(made->mutex, [made] { made->num_inside = 0; });
    return made;
  }();
  return *exit;
}

}  // namespace

BlockingCall::BlockingCall() {
  hold_if_exiting();
  std::lock_guard<std::mutex> lock(state().mutex);
  ++state().num_inside;
}

BlockingCall::~BlockingCall() {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (--state().num_inside == 0) state().cv.notify_all();
  }
  hold_if_exiting();
}

void hold_other_threads(std::chrono::milliseconds patience) {
  auto& exit = state();
  std::unique_lock<std::mutex> lock(exit.mutex);
  exit.cv.wait_for(lock, patience, [&] { return exit.num_inside == 0; });
  exit.exiting_thread = std::this_thread::get_id();
  exit.holding.store(true, std::memory_order_release);
}

void hold_if_exiting() {
  auto& exit = state();
  if (!exit.holding.load(std::memory_order_acquire)) return;
  if (exit.exiting_thread == std::this_thread::get_id()) return;
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace gpumode
