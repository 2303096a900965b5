#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "optim/job.h"
#include "optim/rules.h"

namespace gpumode::ops {

// The arguments of an optimizer's op, as its schema has them; torch_gpumode/ops.py says what each
// means.
struct OptimArgs {
  at::TensorList params, grads, states, masters, steps, scalars;
  at::Tensor hyper;
  at::IntArrayRef groups;
  std::optional<std::vector<int64_t>> numbers, present;
  std::optional<std::string_view> master;
  bool stochastic = false;
  int64_t seed = 0;
  std::optional<at::Tensor> grad_scale, found_inf, grad_sum;
  std::optional<double> max_norm;
};

// Whether there is an op of the rule: one whose passes have nothing between them.
bool has_op(const optim::Rule& rule);

// What can be told without the values, and where sizes may be symbolic. Throws ValueError.
void check_lists(const optim::Rule& rule, const OptimArgs& args);

// Of a parameter, in order: the indices of the states in OptimArgs::states, -1 for one it has not,
// and of the master in OptimArgs::masters.
struct Belongings {
  std::vector<int64_t> states;
  int64_t master = -1;
  optim::Master master_kind = optim::Master::None;
};
std::vector<Belongings> belongings(const optim::Rule& rule, const OptimArgs& args);

// The ops themselves.
void step(const optim::Rule& rule, const OptimArgs& args);
at::Tensor grad_sum(at::TensorList grads, const std::optional<at::Tensor>& grad_scale);

}  // namespace gpumode::ops
