#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/channel.h"

namespace gpumode {

// A store that answers by a deadline: torch's clients wait without a bound for a server that is
// frozen or whose network is lost. Calls run on a thread of this object's own, which is left behind
// with a call that does not return. A call that is late throws CollectiveTimeout.
class BoundedStore {
 public:
  using Bytes = std::vector<uint8_t>;

  // Answers until `timeout` from now.
  BoundedStore(c10::intrusive_ptr<::c10d::Store> store, Duration timeout);
  ~BoundedStore();
  BoundedStore(const BoundedStore&) = delete;
  BoundedStore& operator=(const BoundedStore&) = delete;

  void set(const std::string& key, const std::string& value);
  bool check(const std::vector<std::string>& keys);
  std::vector<Bytes> multi_get(const std::vector<std::string>& keys);

  // Runs f(store) on the thread. What `f` refers to must live as long as it does.
  template <class F>
  auto call(F f) {
    using Result = decltype(f(std::declval<::c10d::Store&>()));
    auto task = std::make_shared<std::packaged_task<Result()>>(
        [f = std::move(f), store = store_]() mutable { return f(*store); });
    auto result = task->get_future();
    post([task] { (*task)(); });
    wait_for(
        [&](TimePoint until) { return result.wait_until(until) == std::future_status::ready; });
    return result.get();
  }

 private:
  struct Worker;
  void post(std::function<void()> job);
  void wait_for(const std::function<bool(TimePoint)>& ready_by) const;

  const c10::intrusive_ptr<::c10d::Store> store_;
  const TimePoint deadline_;
  const std::shared_ptr<Worker> worker_;
};

}  // namespace gpumode
