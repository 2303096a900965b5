#pragma once

#include <cstddef>
#include <cstdint>

#include "core/op.h"

namespace gpumode::optim {

// What a kernel is told of one step: plain pointers and numbers, the same for CPU and CUDA.

constexpr int kMaxStates = 3;
constexpr int kMaxSums = 2;
constexpr int kMaxHyper = 10;
constexpr int kMaxDims = 25;  // as many as torch's own kernels take, after dimensions were merged

// One of the tensors that belong to a parameter. All have its shape.
struct Operand {
  void* data = nullptr;              // nullptr: there is none
  const int64_t* strides = nullptr;  // in elements, per dimension; nullptr: as the elements lie
  DType dtype = DType::F32;          // U8: a state in blocks, see blocks.h; it has no strides
};

// Where the exact value of a parameter in half precision is kept.
enum class Master : uint8_t {
  None,         // nowhere: the parameter is all there is
  F32,          // in `master`
  Remainder16,  // in the bfloat16 parameter, with 16 more bits in `master`
};

// One parameter.
struct Job {
  int64_t numel = 0;
  Operand param, grad, master;
  Operand states[kMaxStates];
  int num_dims = 0;  // 0 unless an operand has strides
  const int64_t* sizes = nullptr;
  Master master_kind = Master::None;
  bool stochastic = false;        // what is stored as bfloat16 is rounded stochastically
  uint64_t seed = 0;              // of the random bits
  uint32_t index = 0;             // in the table
  uint32_t number = 0;            // among the optimizer's parameters, for random bits
  const double* hyper = nullptr;  // of its group, in the order of its rule (rules.h)
  double step = 0.0;              // that this is: 1, 2, ...
  double scalar = 0.0;            // a state of one number for the whole tensor
  double sums[kMaxSums] = {};     // over the tensor, by the phase before
};

// For all of them.
struct StepOptions {
  double grad_factor = 1.0;  // gradients are multiplied by it first
};

}  // namespace gpumode::optim
