#include "optim/table.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optim/grads.h"

namespace gpumode::optim {
namespace {

// Autograd notices that a tensor it has saved was changed.
void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Each gradient as its own parameter, which says in what type to compute.
std::vector<Job> jobs_of(const std::vector<at::Tensor>& grads, std::deque<Layout>* layouts) {
  std::vector<Job> jobs(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    check_grad(grads[i], grads[i]);
    jobs[i].numel = grads[i].numel();
    jobs[i].param = jobs[i].grad = operand(grads[i]);
    lay_out(&jobs[i], {{&grads[i], &jobs[i].param}, {&grads[i], &jobs[i].grad}}, layouts);
  }
  return jobs;
}

}  // namespace

Table::Table(const std::string& rule_name) : rule_(rule(rule_name)) {}

int64_t Table::add(const at::Tensor& param, const at::Tensor& owner, int64_t group,
                   int64_t number) {
  params_.push_back({param, owner, {}, group, number, std::nullopt});
  return static_cast<int64_t>(params_.size()) - 1;
}

void Table::set_state(int64_t index, ParamState state) {
  TORCH_INTERNAL_ASSERT(state.states.size() == static_cast<size_t>(rule_.num_states));
  params_.at(static_cast<size_t>(index)).state = std::move(state);
}

void Table::set_one_state(int64_t index, int64_t which, const at::Tensor& state) {
  std::optional<ParamState>& kept = params_.at(static_cast<size_t>(index)).state;
  if (kept) kept->states.at(static_cast<size_t>(which)) = state;
}

void Table::set_grad(int64_t index, const at::Tensor& grad) {
  params_.at(static_cast<size_t>(index)).grad = grad;
}

void Table::set_hyper(int64_t group, std::vector<double> values, bool stochastic, uint64_t seed) {
  TORCH_INTERNAL_ASSERT(values.size() == rule_.hyper.size());
  groups_.resize(std::max(groups_.size(), static_cast<size_t>(group) + 1));
  groups_[static_cast<size_t>(group)] = {std::move(values), stochastic, seed};
}

const at::Tensor& Table::grad_of(const Param& param) const {
  return param.owner.defined() ? param.owner.grad() : param.grad;
}

std::vector<int64_t> Table::without_state() const {
  std::vector<int64_t> found;
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

// Whether all that belongs to a parameter is contiguous and of the dtypes that are usual, and so
// needs no further look.
bool Table::is_plain(const Param& param, const at::Tensor& grad) const {
  const at::Tensor& p = param.param;
  const auto fits = [&](const at::Tensor& other) {
    return !other.defined() ||
           (other.layout() == at::kStrided && other.is_contiguous() && other.sizes() == p.sizes() &&
            other.device() == p.device() && is_supported(other.scalar_type()));
  };
  return param.state->master_kind == Master::None && p.is_contiguous() &&
         is_supported(p.scalar_type()) && fits(grad) &&
         std::all_of(param.state->states.begin(), param.state->states.end(), fits);
}

// Fails before anything is changed, or not at all.
void Table::collect_jobs() {
  jobs_.clear();
  job_params_.clear();
  layouts_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& param = params_[i];
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined() || !param.state) continue;
    const bool is_plain = this->is_plain(param, grad);
    if (!is_plain) check(param, grad);
    job_params_.push_back(&param);
    Job& job = jobs_.emplace_back();
    job.index = static_cast<uint32_t>(i);
    fill(&job, param, grad);
    if (!is_plain) lay_out(&job, operands(&job, param, grad), &layouts_);
  }
}

void Table::fill(Job* job, const Param& param, const at::Tensor& grad) const {
  const ParamState& state = *param.state;
  const Group& group = groups_.at(static_cast<size_t>(param.group));
  job->numel = param.param.numel();
  job->number = static_cast<uint32_t>(param.number);
  job->hyper = group.hyper.data();
  job->stochastic = group.stochastic;
  job->seed = group.seed;
  job->step = static_cast<double>(*state.step.const_data_ptr<float>()) + 1.0;
  if (state.scalar.defined()) job->scalar = *state.scalar.const_data_ptr<float>();
  job->master_kind = state.master_kind;
  job->param = operand(param.param);
  job->grad = operand(grad);
  if (state.master.defined()) job->master = operand(state.master);
  for (int k = 0; k < rule_.num_states; ++k) {
    if (state.states[k].defined()) job->states[k] = operand(state.states[k]);
  }
}

Operands Table::operands(Job* job, const Param& param, const at::Tensor& grad) const {
  Operands all = {{&param.param, &job->param}, {&grad, &job->grad}};
  if (param.state->master.defined()) all.emplace_back(&param.state->master, &job->master);
  for (int k = 0; k < rule_.num_states; ++k) {
    const at::Tensor& state = param.state->states[k];
    if (state.defined()) all.emplace_back(&state, &job->states[k]);
  }
  return all;
}

at::Tensor Table::sums() const {
  const auto num_params = static_cast<int64_t>(params_.size());
  const at::Tensor sums = at::zeros({num_params, kMaxSums}, at::kDouble);
  auto* to = sums.mutable_data_ptr<double>();
  for (const Job& job : jobs_) std::copy_n(job.sums, kMaxSums, to + job.index * kMaxSums);
  return sums;
}

at::Tensor Table::grad_sums(double factor) {
  jobs_.clear();
  layouts_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = grad_of(params_[i]);
    if (!grad.defined()) continue;
    check_grad(params_[i].param, grad);
    Job& job = jobs_.emplace_back();
    job.index = static_cast<uint32_t>(i);
    job.numel = grad.numel();
    job.param = operand(params_[i].param);  // says in what type to compute
    job.grad = operand(grad);
    if (!grad.is_contiguous()) lay_out(&job, {{&grad, &job.grad}}, &layouts_);
  }
  passes_.run(&jobs_, {run_pieces<GradNorm>}, {factor}, /*keeps_sums=*/true);
  return sums().select(1, 0);
}

at::Tensor Table::start(const StepOptions& options) {
  collect_jobs();
  const std::vector<Pass> first(rule_.passes.begin(), rule_.passes.end() - 1);
  if (first.empty()) return {};
  passes_.run(&jobs_, first, options, /*keeps_sums=*/true);
  return sums();
}

void Table::finish(const StepOptions& options, const at::Tensor& sums) {
  if (sums.defined()) {
    const auto* from = sums.const_data_ptr<double>();
    for (Job& job : jobs_) std::copy_n(from + job.index * kMaxSums, kMaxSums, job.sums);
  }
  passes_.run(&jobs_, {rule_.passes.back()}, options);
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const Param& param = *job_params_[i];
    *param.state->step.mutable_data_ptr<float>() += 1.0f;
    bump_version(param.param);
    if (rule_.next_scalar == nullptr) continue;
    *param.state->scalar.mutable_data_ptr<float>() =
        static_cast<float>(rule_.next_scalar(jobs_[i]));
  }
}

double grad_norm(const std::vector<at::Tensor>& grads) {
  std::deque<Layout> layouts;
  std::vector<Job> jobs = jobs_of(grads, &layouts);
  Passes passes;
  passes.run(&jobs, {run_pieces<GradNorm>}, {1.0}, /*keeps_sums=*/true);
  double total = 0.0;
  for (const Job& job : jobs) total += job.sums[0];
  return std::sqrt(total);
}

void scale_(const std::vector<at::Tensor>& grads, double factor) {
  std::deque<Layout> layouts;
  std::vector<Job> jobs = jobs_of(grads, &layouts);
  Passes passes;
  passes.run(&jobs, {run_pieces<GradScale>}, {factor});
  for (const at::Tensor& grad : grads) bump_version(grad);
}

}  // namespace gpumode::optim
