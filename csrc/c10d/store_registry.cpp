#include "c10d/store_registry.h"

#include <thread>
#include <utility>

namespace gpumode {
namespace {

std::string text(const BoundedStore::Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

BoundedStore& StoreRegistry::store() {
  if (bounded_ == nullptr) {
    bounded_ = std::make_unique<BoundedStore>(store_, answers_until_ - now());
  }
  return *bounded_;
}

void StoreRegistry::sleep_until(TimePoint time) { std::this_thread::sleep_until(time); }

void StoreRegistry::set(const std::string& key, const std::string& value) {
  store().set(key, value);
}

std::string StoreRegistry::set_once(const std::string& key, const std::string& value) {
  return text(store().call([key, value](::c10d::Store& store) {
    return store.compareSet(key, BoundedStore::Bytes(),
                            BoundedStore::Bytes(value.begin(), value.end()));
  }));
}

std::vector<std::optional<std::string>> StoreRegistry::get(const std::vector<std::string>& keys) {
  // All questions in one visit to the thread that asks them.
  const auto [there, values] = store().call([keys](::c10d::Store& store) {
    std::vector<bool> there(keys.size(), true);
    std::vector<std::string> found = keys;
    if (!store.check(keys)) {
      found.clear();
      for (size_t i = 0; i < keys.size(); ++i) {
        there[i] = keys.size() > 1 && store.check({keys[i]});
        if (there[i]) {
          found.push_back(keys[i]);
        }
      }
    }
    auto values = found.empty() ? std::vector<BoundedStore::Bytes>() : store.multiGet(found);
    return std::make_pair(std::move(there), std::move(values));
  });
  std::vector<std::optional<std::string>> result(keys.size());
  auto value = values.begin();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (there[i]) {
      result[i] = text(*value++);
    }
  }
  return result;
}

}  // namespace gpumode
