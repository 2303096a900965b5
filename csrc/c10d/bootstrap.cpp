#include "c10d/bootstrap.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <utility>

namespace gpumode {

namespace {

// Without the C++ stack that torch's own errors carry.
std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace

Bootstrap::Bootstrap(c10::intrusive_ptr<::c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

Membership Bootstrap::exchange(const std::string& handle, std::chrono::milliseconds timeout) {
  if (size_ == 1) {
    return {uuid_of({handle}), {handle}};
  }
  std::vector<std::string> keys, handles;
  try {
    generation_ = store_->add("gpumode/generation/" + std::to_string(rank_), 1);
    store_->set(key(rank_), handle);
    for (int rank = 0; rank < size_; ++rank) {
      keys.push_back(key(rank));
    }
    store_->wait(keys, timeout);
    for (const auto& k : keys) {
      handles.push_back(store_->get_to_str(k));
    }
  } catch (const std::exception& e) {
    const auto missing = missing_ranks();
    TORCH_CHECK_WITH(DistStoreError, false, "rank ", rank_, " of ", size_,
                     " could not open its group: ",
                     missing.empty() ? "the store is gone"
                                     : "within " + std::to_string(timeout.count()) +
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
    store_->deleteKey(key(rank_));
  } catch (const std::exception&) {
    // Some stores cannot delete; the key is a few bytes that nobody reads again.
    return;
  }
}

std::string Bootstrap::key(int rank) const {
  return "gpumode/handle/" + std::to_string(generation_) + "/" + std::to_string(rank);
}

// Empty if the store does not answer.
std::string Bootstrap::missing_ranks() const {
  std::string missing;
  try {
    for (int rank = 0; rank < size_; ++rank) {
      if (!store_->check({key(rank)})) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
  } catch (const std::exception&) {
    return "";
  }
  return missing;
}

int64_t uuid_of(const std::vector<std::string>& handles) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const auto& handle : handles) {
    for (const char c : handle) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    }
    hash = (hash ^ 0xff) * 1099511628211ULL;  // so that ("ab", "c") is not ("a", "bc")
  }
  return static_cast<int64_t>(hash >> 1);
}

}  // namespace gpumode
