#pragma once

#include <cstdint>

#include "core/status.h"
#include "optim/blocks.h"
#include "optim/job.h"

// One pass of an update over all tensors in one kernel. Plain C++: what the host side needs of it.
namespace gpumode::optim {

// What values are computed in. Each has a kernel of its own.
enum class Kind : uint8_t { Float, Double };
constexpr int kNumKinds = 2;

// The dtypes of a parameter and of what belongs to it. For these combinations there is a loop that
// knows them, for all others one that looks them up. With states in blocks, where instructions are
// what a step waits for, it also knows that only the usual states are there.
enum class Form : uint8_t {
  Any,
  Float32,
  BFloat16,
  BFloat16States32,
  BFloat16Master32,
  BFloat16Remainder16,
  Float32States8,
  BFloat16States8,
  BFloat16Master32States8,
  BFloat16Remainder16States8,
};
constexpr int kNumForms = 10;

struct FormDtypes {
  DType param, grad, state;
  Master master;
};

constexpr FormDtypes kFormDtypes[kNumForms] = {
    {},
    {DType::F32, DType::F32, DType::F32, Master::None},
    {DType::BF16, DType::BF16, DType::BF16, Master::None},
    {DType::BF16, DType::BF16, DType::F32, Master::None},
    {DType::BF16, DType::BF16, DType::F32, Master::F32},
    {DType::BF16, DType::BF16, DType::F32, Master::Remainder16},
    {DType::F32, DType::F32, DType::U8, Master::None},
    {DType::BF16, DType::BF16, DType::U8, Master::None},
    {DType::BF16, DType::BF16, DType::U8, Master::F32},
    {DType::BF16, DType::BF16, DType::U8, Master::Remainder16},
};

// A tensor is updated in tiles, whose length is a multiple of this, so that all threads of a block
// have a vector; and this where a state is in blocks (blocks.h), whose exponents so are vectors.
constexpr int64_t kTileUnit = 1024;
constexpr int64_t kTileOfBlocks = int64_t{kBlock} * 16;
static_assert(kTileOfBlocks % kTileUnit == 0);

// The most blocks that a kernel has.
constexpr uint32_t kMaxBlocks = 512;

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
  uint32_t first_tile, num_tiles;  // at least one, so that the step of an empty tensor counts
  uint32_t tile_length;            // in elements
  uint32_t first_sum;              // its first in Launch::partial_sums
  uint32_t index, group, number;   // in the table, of the table's, among the optimizer's
  DType param_dtype, grad_dtype, master_dtype, state_dtypes[kMaxStates];
  Master master_kind;
  Form form;
  // So many elements at a time can be loaded ahead, if the gradient is aligned to 16 bytes, too; 0:
  // none, since not all lies in the same order, is aligned, and of dtypes that vectors are there
  // for.
  uint8_t load_unit;
};

// The parameters of one kernel.
struct Launch {
  const Row* rows;
  void* const* grads;  // [num_rows]; nullptr: there is none, and the row stays as it is; sums are 0
  uint32_t num_rows;
  const uint32_t* row_of_tiles;  // [num_tiles]
  uint32_t num_tiles;
  // Of shared memory, for what is loaded ahead: enough for one tile of any row, or for the
  // gradients of `grads_at_once` tiles.
  uint32_t stage_bytes, grads_at_once;
  // How tiles are dealt out: where there are sums, in units of so many, so that few parts are left
  // to add up; and so many units at a time, which is for `launch` to say.
  uint32_t tiles_of_sum, hand;
  Kind kind;

  const double* hyper;  // [groups, kMaxHyper]
  bool stochastic;
  uint64_t seed;
  bool is_last_pass;  // which counts the step

  const float* grad_scale;  // nullptr, or what gradients are divided by first
  const float* found_inf;   // nullptr, or not 0: nothing is changed
  const double* grad_sum;   // nullptr, or the squared norm of the gradients, after that
  double max_norm;          // to which they are clipped then

  double* sums;          // [parameters of the table, kMaxSums]; nullptr: only the total is wanted
  double* partial_sums;  // [.., kMaxSums], at Row::first_sum; or of each block
  // [num_rows + 2], zeros, which they are again when the kernel has ended: tiles that are done, of
  // each row; rows that are done; tiles that are dealt out.
  uint32_t* tickets;
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
