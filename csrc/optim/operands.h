#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <utility>
#include <vector>

#include "optim/job.h"

namespace gpumode::optim {

// From at::Tensor to operands. Checks throw RuntimeError, before anything is changed.

bool is_supported(at::ScalarType dtype);
// Whether it is a state in blocks (blocks.h) of a parameter that can have one.
bool is_in_blocks(const at::Tensor& param, const at::Tensor& state);
Operand operand(const at::Tensor& tensor);

// That `grad` can be the gradient of `param`, and that `state` can be one of its states (`what`
// names it), of `dtype` or of any that is supported if that is Undefined, or in blocks.
void check_grad(const at::Tensor& param, const at::Tensor& grad);
void check_state(const at::Tensor& param, const at::Tensor& state, const char* what,
                 at::ScalarType dtype = at::ScalarType::Undefined);
// That `number` can be a state of one number.
void check_number(const at::Tensor& param, const at::Tensor& number);

// Sizes and strides of what does not lie as its parameter does.
struct Layout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides[3 + kMaxStates];
};

// The tensors of a job that have its shape, the parameter first, and the operands that they become.
using Operands = std::vector<std::pair<const at::Tensor*, Operand*>>;

// Gives a job dimensions, unless all its tensors' elements lie in the same order. `layouts` keeps
// them.
void lay_out(Job* job, const Operands& operands, std::deque<Layout>* layouts);

}  // namespace gpumode::optim
