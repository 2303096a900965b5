#include "ops/optim.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/scalar_tensor.h>

#include <memory>
#include <utility>

#include "optim/table.h"

namespace gpumode::ops {
namespace {

using optim::Master;
using optim::Rule;

bool is_half(const at::Tensor& param) {
  return param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf;
}

void check_length(size_t got, size_t expected, const char* what) {
  TORCH_CHECK_VALUE(got == expected, what, ": expected ", expected,
                    ", one for each of params, got ", got);
}

Master kind_of(const OptimArgs& args) {
  if (!args.master) return Master::None;
  if (*args.master == "fp32") return Master::F32;
  TORCH_CHECK_VALUE(*args.master == "remainder16",
                    "master: expected None, \"fp32\" or \"remainder16\", got \"", *args.master,
                    "\"");
  return Master::Remainder16;
}

void check_number(const at::Tensor& tensor, const char* what, at::Device device) {
  TORCH_CHECK_VALUE(
      tensor.numel() == 1 && tensor.scalar_type() == at::kFloat && tensor.device() == device, what,
      ": expected one number of ", at::kFloat, " on ", device, ", got ", tensor.numel(), " of ",
      tensor.scalar_type(), " on ", tensor.device());
}

at::Tensor number(const std::optional<at::Tensor>& tensor, const char* what, at::Device device,
                  at::ScalarType dtype) {
  if (!tensor) return {};
  TORCH_CHECK_VALUE(tensor->numel() == 1, what, ": expected one number, got ", tensor->numel());
  return tensor->to(device, dtype, /*non_blocking=*/true);
}

optim::Scale scale_of(const OptimArgs& args, at::Device device) {
  optim::Scale scale;
  scale.grad_scale = number(args.grad_scale, "grad_scale", device, at::kFloat);
  scale.found_inf = number(args.found_inf, "found_inf", device, at::kFloat);
  if (args.max_norm) {
    scale.grad_sum = number(args.grad_sum, "grad_sum", device, at::kDouble);
    scale.max_norm = *args.max_norm;
  }
  return scale;
}

void check_hyper(const Rule& rule, const OptimArgs& args, at::Device device) {
  const at::Tensor& hyper = args.hyper;
  const auto row = static_cast<int64_t>(rule.hyper.size());
  TORCH_CHECK_VALUE(hyper.scalar_type() == at::kDouble && hyper.device() == device &&
                        hyper.dim() == 2 && hyper.size(1) >= row,
                    "hyper: expected float64 of shape [num_groups, at least ", row, "] on ", device,
                    ", got ", hyper.scalar_type(), " of shape ", hyper.sizes(), " on ",
                    hyper.device());
  for (const int64_t group : args.groups) {
    TORCH_CHECK_VALUE(0 <= group && group < hyper.size(0),
                      "groups: expected rows of hyper, which has ", hyper.size(0), ", got ", group);
  }
}

}  // namespace

bool has_op(const Rule& rule) { return &rule != &optim::kMuon; }

void check_lists(const Rule& rule, const OptimArgs& args) {
  const size_t num_params = args.params.size();
  check_length(args.grads.size(), num_params, "grads");
  check_length(args.steps.size(), num_params, "steps");
  check_length(args.groups.size(), num_params, "groups");
  if (args.numbers) check_length(args.numbers->size(), num_params, "numbers");
  if (rule.next_scalar != nullptr) {
    check_length(args.scalars.size(), num_params, "scalars");
  } else {
    TORCH_CHECK_VALUE(args.scalars.empty(), "scalars: ", rule.name, " has none, got ",
                      args.scalars.size());
  }
  TORCH_CHECK_VALUE(!args.max_norm || (*args.max_norm >= 0.0 && args.grad_sum),
                    "max_norm: expected a number of at least 0, and grad_sum with it, got ",
                    *args.max_norm, args.grad_sum ? "" : " and no grad_sum");
  belongings(rule, args);
}

std::vector<Belongings> belongings(const Rule& rule, const OptimArgs& args) {
  const size_t num_params = args.params.size();
  const int64_t all = int64_t{1} << rule.num_states;
  // Without `present`, as many of each, from the first.
  int64_t same = 0;
  if (args.present) {
    check_length(args.present->size(), num_params, "present");
  } else if (num_params > 0) {
    const size_t each = args.states.size() / num_params;
    TORCH_CHECK_VALUE(
        each * num_params == args.states.size() && each <= static_cast<size_t>(rule.num_states),
        "states: expected as many for each of ", num_params, " params, at most ", rule.num_states,
        ", or else `present`, got ", args.states.size());
    same = (int64_t{1} << each) - 1;
  }
  const Master kind = kind_of(args);
  std::vector<Belongings> found(num_params);
  int64_t next_state = 0, next_master = 0;
  for (size_t i = 0; i < num_params; ++i) {
    const int64_t present = args.present ? (*args.present)[i] : same;
    TORCH_CHECK_VALUE(0 <= present && present < all, "present: expected less than ", all,
                      ", a bit for each state of ", rule.name, ", got ", present);
    for (int k = 0; k < rule.num_states; ++k) {
      found[i].states.push_back((present >> k) & 1 ? next_state++ : -1);
    }
    if (kind != Master::None && is_half(args.params[i])) {
      found[i].master = next_master++;
      found[i].master_kind = kind;
    }
  }
  TORCH_CHECK_VALUE(static_cast<size_t>(next_state) == args.states.size(), "states: expected ",
                    next_state, ", as `present` says, got ", args.states.size());
  TORCH_CHECK_VALUE(static_cast<size_t>(next_master) == args.masters.size(), "masters: expected ",
                    next_master,
                    ", one for each of params in half precision if there is `master`, ", "got ",
                    args.masters.size());
  return found;
}

void step(const Rule& rule, const OptimArgs& args) {
  check_lists(rule, args);
  if (args.params.empty()) return;
  const at::Device device = args.params[0].device();
  check_hyper(rule, args, device);
  const std::unique_ptr<optim::Table> table = optim::Table::make(rule.name, device);
  table->set_hyper_tensor(args.hyper);
  table->set_rounding(args.stochastic, static_cast<uint64_t>(args.seed));
  const std::vector<Belongings> owned = belongings(rule, args);
  for (size_t i = 0; i < args.params.size(); ++i) {
    check_number(args.steps[i], "steps", device);
    if (!args.scalars.empty()) check_number(args.scalars[i], "scalars", device);
    optim::ParamState state;
    state.step = args.steps[i];
    if (!args.scalars.empty()) state.scalar = args.scalars[i];
    for (const int64_t at : owned[i].states) {
      state.states.push_back(at < 0 ? at::Tensor() : args.states[static_cast<size_t>(at)]);
    }
    state.master_kind = owned[i].master_kind;
    if (owned[i].master >= 0) state.master = args.masters[static_cast<size_t>(owned[i].master)];
    const int64_t n = args.numbers ? (*args.numbers)[i] : static_cast<int64_t>(i);
    const int64_t index = table->add(args.params[i], {}, args.groups[i], n);
    table->set_grad(index, args.grads[i]);
    table->set_state(index, std::move(state));
  }
  const optim::Scale scale = scale_of(args, device);
  table->finish(scale, table->start(scale));
  // The table does this for the parameters.
  for (const at::TensorList list : {args.states, args.masters, args.steps, args.scalars}) {
    for (const at::Tensor& changed : list) {
      if (!changed.is_inference()) changed.unsafeGetTensorImpl()->bump_version();
    }
  }
}

at::Tensor grad_sum(at::TensorList grads, const std::optional<at::Tensor>& grad_scale) {
  if (grads.empty()) return at::scalar_tensor(0.0, at::kDouble);
  const at::Device device = grads[0].device();
  const std::unique_ptr<optim::Table> table = optim::Table::make(optim::kGrads.name, device);
  for (const at::Tensor& grad : grads) {
    // As its own parameter, which must not share memory with itself.
    const bool overlaps =
        grad.layout() == at::kStrided && at::has_internal_overlap(grad) == at::MemOverlap::Yes;
    const at::Tensor own = overlaps ? grad.contiguous() : grad;
    table->set_grad(table->add(own, {}, 0, 0), own);
  }
  optim::Scale scale;
  scale.grad_scale = number(grad_scale, "grad_scale", device, at::kFloat);
  return table->grad_sums(scale, /*needs_each=*/false).total;
}

}  // namespace gpumode::ops
