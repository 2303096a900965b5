#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "c10d/bounded_store.h"
#include "core/engine.h"

namespace gpumode {

// The first meeting of a group's members: each publishes its handle in the store and reads all
// others'. Throws DistStoreError naming the ranks that did not come within `timeout`, or saying
// that the store is gone.
//
// A store outlives groups, so each key carries how many groups this rank has opened under the
// store's prefix: a handle of an earlier one is never picked up.
class Bootstrap {
 public:
  Bootstrap(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
            std::chrono::milliseconds timeout);

  Membership exchange(const std::string& handle);
  // Removes this rank's key, once everybody is known to have read it. Errors are of no consequence.
  void clean_up() noexcept;

 private:
  std::string key(int rank) const;
  std::vector<std::string> keys() const;
  std::string missing_ranks();

  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  BoundedStore store_;
  int64_t generation_ = 0;
};

}  // namespace gpumode
