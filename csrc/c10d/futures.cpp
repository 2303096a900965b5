#include "c10d/futures.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "c10d/fork.h"
#include "core/os/thread.h"

namespace gpumode {
namespace {

// Started by the first job, and never destroyed: it may be in use until the last instant.
class FutureThread {
 public:
  FutureThread() : fork_count_(fork_count()) {}

  void push(std::function<void()> job) {
    if (fork_count_ != fork_count()) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      return;
    }
    if (!started_) {
      os::start_thread("gpumode_futures", [this] { run(); }).detach();
      started_ = true;
    }
    jobs_.push_back(std::move(job));
    cv_.notify_all();
  }

  void stop(std::chrono::milliseconds patience) {
    if (fork_count_ != fork_count()) {
      return;
    }
    std::deque<std::function<void()>> dropped;  // destroyed outside the lock
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    dropped.swap(jobs_);
    cv_.notify_all();
    cv_.wait_for(lock, patience, [this] { return !started_; });
    lock.unlock();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      cv_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
      if (stopped_) {
        break;
      }
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;  // what it captured is released outside the lock
      lock.lock();
    }
    started_ = false;
    cv_.notify_all();
  }

  const int fork_count_;
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<std::function<void()>> jobs_;
  bool started_ = false, stopped_ = false;
};

FutureThread& future_thread() {
  static auto* thread = new FutureThread();
  return *thread;
}

}  // namespace

void run_on_future_thread(std::function<void()> job) { future_thread().push(std::move(job)); }

void stop_future_thread(std::chrono::milliseconds patience) { future_thread().stop(patience); }

}  // namespace gpumode
