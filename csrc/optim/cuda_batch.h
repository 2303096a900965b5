#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/cuda_pass.h"
#include "optim/rules.h"

namespace gpumode::optim {

// Bytes on the device that follow bytes on the host. What a CUDA graph has recorded is not changed
// any more: the next bytes get memory of their own.
class DeviceCopy {
 public:
  void upload(const void* data, int64_t nbytes, at::Device device);
  // For a kernel that is launched now.
  void* address();
  bool was_recorded() const { return is_recorded_ || !recorded_.empty(); }
  // Whether the bytes come when a graph is replayed, and so may not be there now.
  bool is_of_a_graph() const;

 private:
  at::Tensor tensor_;
  bool is_recorded_ = false, is_uploaded_by_graph_ = false;
  std::vector<at::Tensor> recorded_;
};

// The parameters of one kernel.
struct Batch {
  // What a row was made from.
  struct Seen {
    std::vector<int64_t> param_strides, grad_strides;
    std::vector<int64_t> layout;  // as Row::layout
  };

  std::vector<Row> rows;
  std::vector<void*> grads;
  std::vector<Seen> seen;
  bool rows_are_new = true, grads_are_new = true;

  DeviceCopy device_rows, device_grads, layouts, row_of_tiles, tickets;
  uint32_t num_tiles = 0, num_sums = 0, num_tickets = 0, tiles_of_sum = 1;
  int64_t stage_bytes = 0, grads_at_once = 1;

  void clear();
  void add(uint32_t index, const at::Tensor& param);
  // What a row's tensors are, and how they lie.
  void describe(size_t row, const Job& job, const Rule& rule);
  // Makes the device's side follow, and fills in what a kernel needs of it.
  void upload(at::Device device, Launch* launch);

 private:
  void cut(at::Device device);
};

// Whether a CUDA graph is being captured on the current stream.
bool is_capturing();

}  // namespace gpumode::optim
