#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/communicator.h"

namespace gpumode {

// The sizes and types of some tensors, without the tensors.
struct TensorsDescription {
  c10::SmallVector<int64_t, 8> sizes;  // of each tensor: how many dimensions, then these
  c10::SmallVector<at::ScalarType, 2> dtypes;

  TensorsDescription() = default;
  explicit TensorsDescription(const std::vector<at::Tensor>& tensors);
  std::vector<std::vector<int64_t>> shapes() const;
};

// One call of torch's, as the record shows it.
struct CallDescription {
  const char* title = "";  // "gpumode:all_reduce"
  int peer = -1;           // of a send or receive
  TensorsDescription inputs, outputs;
};

// The last ops of one group. What became of an op is asked of the op itself, when somebody wants to
// know: recording costs nothing when it ends. Thread-safe.
class FlightRecorder {
 public:
  struct Entry {
    uint64_t id = 0;  // 0, 1, ... within the process
    int rank = -1;    // ours, then
    std::shared_ptr<const Op> op;
    c10::SmallVector<CallDescription, 1> calls;  // several if they were coalesced
  };

  explicit FlightRecorder(size_t capacity) : capacity_(capacity) {}

  bool enabled() const { return capacity_ > 0; }
  void record(std::shared_ptr<const Op> op, int rank, c10::SmallVector<CallDescription, 1> calls);
  std::vector<Entry> entries() const;  // the oldest first

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Entry> ring_;   // grows up to the capacity
  uint64_t num_recorded_ = 0;
};

}  // namespace gpumode
