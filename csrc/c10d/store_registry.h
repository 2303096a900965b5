#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/bounded_store.h"
#include "core/registry.h"

namespace gpumode {

// The group's store, for a while.
class StoreRegistry : public Registry {
 public:
  StoreRegistry(c10::intrusive_ptr<::c10d::Store> store, TimePoint answers_until)
      : store_(std::move(store)), answers_until_(answers_until) {}

  TimePoint now() const override { return Clock::now(); }
  void sleep_until(TimePoint time) override;
  void set(const std::string& key, const std::string& value) override;
  std::string set_once(const std::string& key, const std::string& value) override;
  std::vector<std::optional<std::string>> get(const std::vector<std::string>& keys) override;

 private:
  BoundedStore& store();

  const c10::intrusive_ptr<::c10d::Store> store_;
  const TimePoint answers_until_;
  std::unique_ptr<BoundedStore> bounded_;  // made when it is needed: it has a thread
};

}  // namespace gpumode
