#include "c10d/futures.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

#include "c10d/fork.h"
#include "core/os/thread.h"

namespace gpumode {
namespace {

// A job that takes longer may be waiting for the next one.
constexpr std::chrono::microseconds kStuck{200};

// Threads are started when none is idle, and live as long as the process. Never destroyed: it may
// be in use until the last instant.
class FutureThreads {
 public:
  FutureThreads() : fork_count_(fork_count()) {}

  void push(std::function<void()> job) {
    if (fork_count_ != fork_count()) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      return;
    }
    jobs_.push_back(std::move(job));
    ensure_idle_thread();
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
    cv_.wait_for(lock, patience, [this] { return num_idle_ + num_running_ == 0; });
    lock.unlock();
  }

 private:
  // Under mutex_. Without a thread more the job waits for those that run.
  void ensure_idle_thread() {
    if (num_idle_ > 0) {
      return;
    }
    try {
      os::start_thread("gpumode_futures", [this] { run(); }).detach();
      ++num_idle_;
    } catch (const std::system_error&) {
      if (num_running_ == 0) {
        throw;
      }
    }
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      cv_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
      if (num_running_ > 0) {
        cv_.wait_for(lock, kStuck,
                     [this] { return stopped_ || jobs_.empty() || num_running_ == 0; });
      }
      if (stopped_) {
        break;
      }
      if (jobs_.empty()) {
        continue;
      }
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      --num_idle_;
      ++num_running_;
      if (!jobs_.empty()) {
        ensure_idle_thread();
      }
      lock.unlock();
      job();
      job = nullptr;  // what it captured is released outside the lock
      lock.lock();
      --num_running_;
      ++num_idle_;
    }
    --num_idle_;
    cv_.notify_all();
  }

  const int fork_count_;
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<std::function<void()>> jobs_;
  int num_idle_ = 0;  // those that are being started included
  int num_running_ = 0;
  bool stopped_ = false;
};

FutureThreads& future_threads() {
  static auto* threads = new FutureThreads();
  return *threads;
}

}  // namespace

void run_on_future_thread(std::function<void()> job) { future_threads().push(std::move(job)); }

void stop_future_threads(std::chrono::milliseconds patience) { future_threads().stop(patience); }

}  // namespace gpumode
