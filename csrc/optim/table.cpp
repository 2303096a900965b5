#include "optim/table.h"

#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <utility>

namespace gpumode::optim {

std::unique_ptr<Table> Table::make(const std::string& rule_name, at::Device device) {
  const Rule& rule = optim::rule(rule_name);
  std::unique_ptr<Table> table;
  if (device.is_cpu()) table = make_cpu_table(rule);
#ifdef GPUMODE_WITH_CUDA
  if (device.is_cuda()) table = make_cuda_table(rule, device);
#endif
  TORCH_CHECK(table != nullptr, "a parameter is on ", device,
              ": expected a device whose kernels are in this build (python -m torch_gpumode env)");
  return table;
}

int64_t Table::add(const at::Tensor& param, const at::Tensor& owner, int64_t group,
                   int64_t number) {
  params_.push_back({param, owner, {}, group, number, std::nullopt, nullptr});
  return static_cast<int64_t>(params_.size()) - 1;
}

void Table::set_state(int64_t index, ParamState state) {
  TORCH_INTERNAL_ASSERT(state.states.size() == static_cast<size_t>(rule_.num_states));
  Param& param = params_.at(static_cast<size_t>(index));
  if (!param.state) ++num_with_state_;
  param.state = std::move(state);
  const std::vector<at::Tensor>& states = param.state->states;
  const bool has_blocks = std::any_of(states.begin(), states.end(), [](const at::Tensor& one) {
    return one.defined() && one.scalar_type() == at::kByte;
  });
  param.sizes.reset(has_blocks ? new std::vector<int64_t>(param.param.sizes().vec()) : nullptr);
  param.is_new = true;
}

void Table::set_one_state(int64_t index, int64_t which, const at::Tensor& state) {
  Param& param = params_.at(static_cast<size_t>(index));
  if (!param.state) return;
  param.state->states.at(static_cast<size_t>(which)) = state;
  param.is_new = true;
}

void Table::set_grad(int64_t index, const at::Tensor& grad) {
  params_.at(static_cast<size_t>(index)).grad = grad;
}

void Table::set_hyper(int64_t group, std::vector<double> values) {
  TORCH_INTERNAL_ASSERT(values.size() == rule_.hyper.size());
  hyper_.resize(std::max(hyper_.size(), static_cast<size_t>(group) + 1));
  hyper_[static_cast<size_t>(group)] = std::move(values);
}

void Table::set_hyper_tensor(const at::Tensor& hyper) {
  const bool is_row = hyper.size(1) == kMaxHyper && hyper.is_contiguous();
  hyper_tensor_ = is_row ? hyper : at::constant_pad_nd(hyper, {0, kMaxHyper - hyper.size(1)});
  hyper_.clear();
}

void Table::set_rounding(bool stochastic, uint64_t seed) {
  stochastic_ = stochastic;
  seed_ = seed;
}

std::vector<int64_t> Table::without_state() const {
  std::vector<int64_t> found;
  if (num_with_state_ == params_.size()) return found;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].state && grad_of(params_[i]).defined()) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  for (size_t i = 0; i < params_.size() && !found.empty(); ++i) {
    const at::Tensor& grad = grad_of(params_[i]);
    if (grad.defined()) check(params_[i], grad);
  }
  return found;
}

void Table::check(const Param& param, const at::Tensor& grad) const {
  check_grad(param.param, grad);
  if (!param.state) return;
  for (const at::Tensor& state : param.state->states) {
    if (state.defined()) check_state(param.param, state, "state");
  }
  TORCH_CHECK(param.sizes == nullptr || param.param.sizes() == *param.sizes,
              "the state of a parameter of shape ", param.param.sizes(), " has the shape ",
              *param.sizes);
  for (const at::Tensor& number : {param.state->step, param.state->scalar}) {
    if (number.defined()) check_number(param.param, number);
  }
  const bool is_f32 = param.state->master_kind == Master::F32;
  const at::ScalarType dtype = param.param.scalar_type();
  TORCH_CHECK(!is_f32 || dtype == at::kBFloat16 || dtype == at::kHalf,
              "master: \"fp32\" is for parameters in half precision, and one is of ", dtype);
  TORCH_CHECK(
      param.state->master_kind != Master::Remainder16 || param.param.scalar_type() == at::kBFloat16,
      "master: \"remainder16\" is for parameters of bfloat16, and one is of ",
      param.param.scalar_type());
  if (param.state->master.defined()) {
    check_state(param.param, param.state->master, "master", is_f32 ? at::kFloat : at::kShort);
  }
}

bool Table::is_plain(const Param& param, const at::Tensor& grad) const {
  const at::Tensor& p = param.param;
  const auto fits = [&](const at::Tensor& other) {
    return !other.defined() ||
           (other.layout() == at::kStrided && other.is_contiguous() && other.sizes() == p.sizes() &&
            other.device() == p.device() && is_supported(other.scalar_type()));
  };
  const auto fits_as_state = [&](const at::Tensor& state) {
    return fits(state) || is_in_blocks(p, state);
  };
  return param.state->master_kind == Master::None && p.is_contiguous() &&
         (param.sizes == nullptr || p.sizes() == *param.sizes) && is_supported(p.scalar_type()) &&
         fits(grad) &&
         std::all_of(param.state->states.begin(), param.state->states.end(), fits_as_state);
}

Operands Table::operands(Job* job, const Param& param, const at::Tensor& grad) const {
  job->numel = param.param.numel();
  Operands all = {{&param.param, &job->param}, {&grad, &job->grad}};
  if (param.state) {
    const ParamState& state = *param.state;
    job->master_kind = state.master_kind;
    if (state.master.defined()) all.emplace_back(&state.master, &job->master);
    for (int k = 0; k < rule_.num_states; ++k) {
      const at::Tensor& one = state.states[k];
      if (!one.defined()) continue;
      if (one.scalar_type() == at::kByte) {
        job->states[k] = operand(one);
      } else {
        all.emplace_back(&one, &job->states[k]);
      }
    }
  }
  for (const auto& [tensor, of_job] : all) *of_job = operand(*tensor);
  return all;
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace gpumode::optim
