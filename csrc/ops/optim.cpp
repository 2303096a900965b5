#include "ops/optim.h"

#include <cmath>
#include <deque>
#include <utility>

#include "optim/grads.h"
#include "optim/operands.h"
#include "optim/passes.h"
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

void check_number(const at::Tensor& tensor, const char* what, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.numel() == 1 && tensor.scalar_type() == dtype && tensor.is_cpu(), what,
                    ": expected one number of ", dtype, " on cpu, got ", tensor.numel(), " of ",
                    tensor.scalar_type(), " on ", tensor.device());
}

double number(const std::optional<at::Tensor>& tensor, const char* what, double otherwise) {
  if (!tensor) return otherwise;
  TORCH_CHECK_VALUE(tensor->numel() == 1, what, ": expected one number, got ", tensor->numel());
  return tensor->item<double>();
}

// What gradients are multiplied by. As torch.nn.utils.clip_grad_norm_ where there is a max_norm.
double grad_factor(const OptimArgs& args) {
  const double factor = 1.0 / number(args.grad_scale, "grad_scale", 1.0);
  if (!args.max_norm) return factor;
  const double norm = std::sqrt(number(args.grad_sum, "grad_sum", 0.0));
  const double coefficient = *args.max_norm / (norm + 1e-6);
  return factor * (coefficient > 1.0 ? 1.0 : coefficient);  // a NaN stays one
}

void check_hyper(const Rule& rule, const OptimArgs& args) {
  const at::Tensor& hyper = args.hyper;
  const auto row = static_cast<int64_t>(rule.hyper.size());
  TORCH_CHECK_VALUE(hyper.scalar_type() == at::kDouble && hyper.is_cpu() && hyper.dim() == 2 &&
                        hyper.size(1) >= row,
                    "hyper: expected float64 of shape [num_groups, at least ", row,
                    "] on cpu, got ", hyper.scalar_type(), " of shape ", hyper.sizes(), " on ",
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
  check_hyper(rule, args);
  optim::Table table(rule.name);
  const at::Tensor hyper = args.hyper.contiguous();
  for (int64_t group = 0; group < hyper.size(0); ++group) {
    const auto* row = hyper.const_data_ptr<double>() + group * hyper.size(1);
    table.set_hyper(group, {row, row + rule.hyper.size()}, args.stochastic,
                    static_cast<uint64_t>(args.seed));
  }
  const std::vector<Belongings> owned = belongings(rule, args);
  for (size_t i = 0; i < args.params.size(); ++i) {
    check_number(args.steps[i], "steps", at::kFloat);
    if (!args.scalars.empty()) check_number(args.scalars[i], "scalars", at::kFloat);
    optim::ParamState state;
    state.step = args.steps[i];
    if (!args.scalars.empty()) state.scalar = args.scalars[i];
    for (const int64_t at : owned[i].states) {
      state.states.push_back(at < 0 ? at::Tensor() : args.states[static_cast<size_t>(at)]);
    }
    state.master_kind = owned[i].master_kind;
    if (owned[i].master >= 0) state.master = args.masters[static_cast<size_t>(owned[i].master)];
    const int64_t n = args.numbers ? (*args.numbers)[i] : static_cast<int64_t>(i);
    const int64_t index = table.add(args.params[i], {}, args.groups[i], n);
    table.set_grad(index, args.grads[i]);
    table.set_state(index, std::move(state));
  }
  const optim::StepOptions options{grad_factor(args)};
  if (number(args.found_inf, "found_inf", 0.0) != 0.0) return;
  table.finish(options, table.start(options));
  // The table does this for the parameters.
  for (const at::TensorList list : {args.states, args.masters, args.steps, args.scalars}) {
    for (const at::Tensor& changed : list) {
      if (!changed.is_inference()) changed.unsafeGetTensorImpl()->bump_version();
    }
  }
}

double grad_sum(at::TensorList grads, const std::optional<at::Tensor>& grad_scale) {
  std::deque<optim::Layout> layouts;
  std::vector<optim::Job> jobs(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    optim::check_grad(grads[i], grads[i]);
    optim::Job& job = jobs[i];
    job.numel = grads[i].numel();
    job.param = job.grad = optim::operand(grads[i]);
    if (!grads[i].is_contiguous()) optim::lay_out(&job, {{&grads[i], &job.grad}}, &layouts);
  }
  optim::Passes passes;
  passes.run(&jobs, {optim::run_pieces<optim::GradNorm>},
             {1.0 / number(grad_scale, "grad_scale", 1.0)}, /*keeps_sums=*/true);
  double total = 0.0;
  for (const optim::Job& job : jobs) total += job.sums[0];
  return total;
}

}  // namespace gpumode::ops
