#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/registry.h"

namespace gpumode {

// What a store is to the members of a test, which are threads or simulated.
class MemoryRegistry : public Registry {
 public:
  explicit MemoryRegistry(std::function<TimePoint()> clock = Clock::now)
      : clock_(std::move(clock)) {}

  TimePoint now() const override { return clock_(); }
  void sleep_until(TimePoint time) override { std::this_thread::sleep_until(time); }

  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
  }
  std::string set_once(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_.emplace(key, value).first->second;
  }
  std::vector<std::optional<std::string>> get(const std::vector<std::string>& keys) override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::optional<std::string>> values;
    for (const std::string& key : keys) {
      const auto found = values_.find(key);
      values.push_back(found == values_.end() ? std::nullopt : std::make_optional(found->second));
    }
    return values;
  }

 private:
  const std::function<TimePoint()> clock_;
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

}  // namespace gpumode
