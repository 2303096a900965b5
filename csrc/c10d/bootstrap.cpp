#include "c10d/bootstrap.h"

#include <utility>

#include "c10d/options.h"
#include "core/uuid.h"

namespace gpumode {

namespace {

// What the store has for answering after it has waited for `timeout`.
constexpr auto kGrace = std::chrono::milliseconds(500);

// Without the C++ stack that torch's own errors carry.
std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace

Bootstrap::Bootstrap(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
                     std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      timeout_(timeout),
      store_(std::move(store), to_duration(timeout) + kGrace) {}

Membership Bootstrap::exchange(const std::string& handle) {
  if (size_ == 1) {
    return {uuid_of({handle}), {handle}};
  }
  std::vector<std::string> handles;
  try {
    const auto counter = "gpumode/generation/" + std::to_string(rank_);
    generation_ = store_.call([counter](::c10d::Store& store) { return store.add(counter, 1); });
    store_.set(key(rank_), handle);
    store_.call(
        [keys = keys(), timeout = timeout_](::c10d::Store& store) { store.wait(keys, timeout); });
    for (const auto& bytes : store_.multi_get(keys())) {
      handles.emplace_back(bytes.begin(), bytes.end());
    }
  } catch (const std::exception& e) {
    const auto missing = missing_ranks();
    TORCH_CHECK_WITH(DistStoreError, false, "rank ", rank_, " of ", size_,
                     " could not open its group: ",
                     missing.empty() ? "the store is gone"
                                     : "within " + std::to_string(timeout_.count()) +
                                           " ms these ranks did not come: " + missing,
                     " (", text_of(e), ")");
  }
  return {uuid_of(handles), std::move(handles)};
}

void Bootstrap::clean_up() noexcept {
  if (size_ == 1) {
    return;
  }
  try {
    store_.call([key = key(rank_)](::c10d::Store& store) { return store.deleteKey(key); });
  } catch (const std::exception&) {
    // Some stores cannot delete; the key is a few bytes that nobody reads again.
    return;
  }
}

std::string Bootstrap::key(int rank) const {
  return "gpumode/handle/" + std::to_string(generation_) + "/" + std::to_string(rank);
}

std::vector<std::string> Bootstrap::keys() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) {
    keys.push_back(key(rank));
  }
  return keys;
}

// Empty if the store does not answer.
std::string Bootstrap::missing_ranks() {
  std::string missing;
  try {
    for (int rank = 0; rank < size_; ++rank) {
      if (!store_.check({key(rank)})) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
  } catch (const std::exception&) {
    return "";
  }
  return missing;
}

}  // namespace gpumode
