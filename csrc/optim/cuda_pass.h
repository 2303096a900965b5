#pragma once

#include <cstdint>

#include "core/status.h"
#include "optim/job.h"

// One pass of an update over all tensors in one kernel. Plain C++: what the host side needs of it.
namespace gpumode::optim {

constexpr int kThreads = 128;
constexpr int kPerThread = 4;
constexpr int64_t kStride = int64_t{kThreads} * kPerThread;  // elements that a block has at a time

// What is computed in what: each has a kernel of its own.
enum class Kind : uint8_t {
  Float32,  // all float32, without masters
  Mixed,    // other parameters that are computed in float
  Float64,
};
constexpr int kNumKinds = 3;

// What the kernels see of one parameter. Its gradient's address, which changes from step to step,
// is in an array of its own.
struct Row {
  void* param;
  void* master;
  void* states[kMaxStates];
  float* step;
  float* scalar;
  int64_t numel;
  // nullptr if the elements of all tensors lie in the same order. Otherwise: how many dimensions,
  // their sizes, and strides per operand: the parameter, the gradient, the master, the states.
  const int64_t* layout;
  uint32_t first_tile;
  uint32_t index, group, number;  // in the table, of the table's, among the optimizer's
  DType param_dtype, grad_dtype, master_dtype, state_dtypes[kMaxStates];
  Master master_kind;
  // That vectors can be loaded, if the gradient is aligned to 16 bytes, too: all lies in the same
  // order, is aligned, and of dtypes that vectors are there for.
  bool is_vector;
};

// The parameters of one kernel.
struct Launch {
  const Row* rows;
  void* const* grads;  // [num_rows]; nullptr: there is none, and the row stays as it is; sums are 0
  uint32_t num_rows;
  // A block has one tile: `tile_length` elements of one row, a multiple of kStride. Each row has at
  // least one, so that its step counts though it is empty.
  const uint32_t* row_of_tiles;  // [num_tiles]
  uint32_t num_tiles;
  int64_t tile_length;
  Kind kind;

  const double* hyper;  // [groups, kMaxHyper]
  bool stochastic;
  uint64_t seed;
  bool is_last_pass;  // which counts the step

  const float* grad_scale;  // nullptr, or what gradients are divided by first
  const float* found_inf;   // nullptr, or not 0: nothing is changed
  const double* grad_sum;   // nullptr, or the squared norm of the gradients, after that
  double max_norm;          // to which they are clipped then

  double* sums;          // [parameters of the table, kMaxSums]
  double* partial_sums;  // [num_tiles, kMaxSums]
  uint32_t* tickets;     // [num_rows + 1], zeros, which they are again when the kernel has ended
  // nullptr, or where the first sum over all tensors goes, and whether it is not finite, as 1 or 0.
  double* total;
  float* total_is_bad;
  bool adds_to_total;  // the kernel before has left its own there
};

// Starts the kernel of an update on `stream`, a cudaStream_t of the current device. In optim/*.cu.
template <template <class> class Update>
Status launch(const Launch& launch, void* stream);

// Copies from host memory, which may be reused at once, to `device` memory: as parameters of
// kernels, so that a CUDA graph which records it keeps the bytes. `nbytes` is a multiple of 4.
Status copy_by_value(void* device, const void* host, int64_t nbytes, void* stream);

// The same beside a capture that is going on, so that the graph does not record it; waits for it.
Status copy_outside_capture(void* device, const void* host, int64_t nbytes);

}  // namespace gpumode::optim
