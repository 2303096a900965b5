#include "c10d/bounded_store.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "c10d/exceptions.h"
#include "c10d/exit.h"

namespace gpumode {

struct BoundedStore::Worker {
  std::mutex mutex;  // guards what follows
  std::condition_variable cv;
  std::deque<std::function<void()>> jobs;
  bool stop = false;

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      cv.wait(lock, [this] { return stop || !jobs.empty(); });
      if (stop) return;
      auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
  }
};

BoundedStore::BoundedStore(c10::intrusive_ptr<::c10d::Store> store, Duration timeout)
    : store_(std::move(store)),
      deadline_(Clock::now() + timeout),
      worker_(std::make_shared<Worker>()) {
  try {
    std::thread([worker = worker_] { worker->run(); }).detach();
  } catch (const std::system_error& error) {
    throw_if_failed({Code::Internal, std::string("cannot start a thread: ") + error.what()});
  }
}

BoundedStore::~BoundedStore() {
  std::lock_guard<std::mutex> lock(worker_->mutex);
  worker_->stop = true;
  worker_->cv.notify_one();
}

void BoundedStore::post(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(worker_->mutex);
  worker_->jobs.push_back(std::move(job));
  worker_->cv.notify_one();
}

void BoundedStore::wait_for(const std::function<bool(TimePoint)>& ready_by) const {
  const BlockingCall blocking;
  if (!ready_by(deadline_)) {
    throw_if_failed({Code::Timeout, "the store did not answer in time"});
  }
}

void BoundedStore::set(const std::string& key, const std::string& value) {
  call([key, value](::c10d::Store& store) { store.set(key, value); });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
  return call([keys](::c10d::Store& store) { return store.check(keys); });
}

std::vector<BoundedStore::Bytes> BoundedStore::multi_get(const std::vector<std::string>& keys) {
  return call([keys](::c10d::Store& store) { return store.multiGet(keys); });
}

}  // namespace gpumode
