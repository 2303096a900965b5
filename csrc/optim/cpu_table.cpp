#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "optim/grads.h"
#include "optim/passes.h"
#include "optim/table.h"

namespace gpumode::optim {
namespace {

class CpuTable final : public Table {
 public:
  using Table::Table;

  GradSums grad_sums(const Scale& scale, bool needs_each) override;
  at::Tensor start(const Scale& scale) override;
  void finish(const Scale& scale, const at::Tensor& sums) override;

 private:
  void collect_jobs();
  void fetch_ahead(size_t i) const;
  void fill(Job* job, const Param& param) const;
  at::Tensor sums() const;

  // Of the step that runs; kept for their memory.
  std::vector<Job> jobs_;
  std::vector<const Param*> job_params_;
  std::deque<Layout> layouts_;
  Passes passes_;
  // Where the parameters' gradients were looked for: hints of what to fetch.
  std::vector<const void*> grad_slots_;
};

template <class T>
T number(const at::Tensor& tensor, T otherwise) {
  return tensor.defined() ? *tensor.const_data_ptr<T>() : otherwise;
}

StepOptions options_of(const Scale& scale) {
  double factor = 1.0 / static_cast<double>(number(scale.grad_scale, 1.0f));
  if (scale.grad_sum.defined()) {
    factor *= clip_coefficient(std::sqrt(number(scale.grad_sum, 0.0)), scale.max_norm);
  }
  return {factor};
}

bool skips(const Scale& scale) { return number(scale.found_inf, 0.0f) != 0.0f; }

void fetch(const void* address) { __builtin_prefetch(address); }

// The descriptions of thousands of tensors are more than caches hold. What is in one of them says
// where the next is, so they are fetched in three steps.
void CpuTable::fetch_ahead(size_t i) const {
  constexpr size_t kFar = 18, kMiddle = 12, kNear = 6;
  if (i + kFar < params_.size()) {
    const Param& param = params_[i + kFar];
    fetch(grad_slots_[i + kFar]);
    fetch(param.param.unsafeGetTensorImpl());
    if (param.state) {
      fetch(param.state->step.unsafeGetTensorImpl());
      fetch(param.state->states.data());
    }
  }
  if (i + kMiddle < params_.size()) {
    const Param& param = params_[i + kMiddle];
    const auto* grad = reinterpret_cast<const char*>(grad_of(param).unsafeGetTensorImpl());
    fetch(grad);
    fetch(grad + sizeof(c10::TensorImpl) - 40);
    if (param.state) {
      for (const at::Tensor& state : param.state->states) fetch(state.unsafeGetTensorImpl());
    }
  }
  if (i + kNear < params_.size()) {
    const Param& param = params_[i + kNear];
    const auto fetch_storage = [](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      fetch(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    };
    fetch_storage(param.param);
    fetch_storage(grad_of(param));
    if (param.state) {
      fetch_storage(param.state->step);
      for (const at::Tensor& state : param.state->states) fetch_storage(state);
    }
  }
}

// Fails before anything is changed, or not at all.
void CpuTable::collect_jobs() {
  jobs_.clear();
  job_params_.clear();
  layouts_.clear();
  for (size_t i = grad_slots_.size(); i < params_.size(); ++i) {
    const at::Tensor& owner = params_[i].owner;
    grad_slots_.push_back(owner.defined() ? &owner.unsafeGetTensorImpl()->grad() : nullptr);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    fetch_ahead(i);
    const Param& param = params_[i];
    const at::Tensor& grad = grad_of(param);
    if (!grad.defined() || !param.state) continue;
    const bool is_plain = this->is_plain(param, grad);
    if (!is_plain) check(param, grad);
    job_params_.push_back(&param);
    Job& job = jobs_.emplace_back();
    job.index = static_cast<uint32_t>(i);
    fill(&job, param);
    if (is_plain) {
      job.numel = param.param.numel();
      job.param = operand(param.param);
      job.grad = operand(grad);
      for (int k = 0; k < rule_.num_states; ++k) {
        if (param.state->states[k].defined()) job.states[k] = operand(param.state->states[k]);
      }
    } else {
      lay_out(&job, operands(&job, param, grad), &layouts_);
    }
  }
}

void CpuTable::fill(Job* job, const Param& param) const {
  if (hyper_tensor_.defined()) {
    job->hyper = hyper_tensor_.const_data_ptr<double>() + param.group * hyper_tensor_.size(1);
  } else if (!hyper_.empty()) {
    job->hyper = hyper_.at(static_cast<size_t>(param.group)).data();
  }
  job->number = static_cast<uint32_t>(param.number);
  job->stochastic = stochastic_;
  job->seed = seed_;
  job->step = static_cast<double>(number(param.state->step, 0.0f)) + 1.0;
  job->scalar = static_cast<double>(number(param.state->scalar, 0.0f));
}

at::Tensor CpuTable::sums() const {
  const auto num_params = static_cast<int64_t>(params_.size());
  const at::Tensor sums = at::zeros({num_params, kMaxSums}, at::kDouble);
  auto* to = sums.mutable_data_ptr<double>();
  for (const Job& job : jobs_) std::copy_n(job.sums, kMaxSums, to + job.index * kMaxSums);
  return sums;
}

GradSums CpuTable::grad_sums(const Scale& scale, bool /*needs_each*/) {
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
  passes_.run(&jobs_, {kGradNorm}, options_of(scale), /*keeps_sums=*/true);
  double total = 0.0;
  for (const Job& job : jobs_) total += job.sums[0];
  GradSums found = {sums().select(1, 0), at::empty({}, at::kDouble), at::empty({}, at::kFloat)};
  *found.total.mutable_data_ptr<double>() = total;
  *found.is_bad.mutable_data_ptr<float>() = std::isfinite(total) ? 0.0f : 1.0f;
  return found;
}

at::Tensor CpuTable::start(const Scale& scale) {
  jobs_.clear();
  job_params_.clear();
  if (skips(scale)) return {};
  collect_jobs();
  const std::vector<Pass> first(rule_.passes.begin(), rule_.passes.end() - 1);
  if (first.empty()) return {};
  passes_.run(&jobs_, first, options_of(scale), /*keeps_sums=*/true);
  return sums();
}

void CpuTable::finish(const Scale& scale, const at::Tensor& sums) {
  if (sums.defined()) {
    const auto* from = sums.const_data_ptr<double>();
    for (Job& job : jobs_) std::copy_n(from + job.index * kMaxSums, kMaxSums, job.sums);
  }
  passes_.run(&jobs_, {rule_.passes.back()}, options_of(scale));
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (i + kAhead < jobs_.size()) {
      const auto& version = job_params_[i + kAhead]->param.unsafeGetTensorImpl()->version_counter();
      fetch(*reinterpret_cast<const void* const*>(&version));
    }
    const Param& param = *job_params_[i];
    if (param.state->step.defined()) *param.state->step.mutable_data_ptr<float>() += 1.0f;
    bump_version(param.param);
    if (rule_.next_scalar == nullptr) continue;
    *param.state->scalar.mutable_data_ptr<float>() =
        static_cast<float>(rule_.next_scalar(jobs_[i]));
  }
}

}  // namespace

std::unique_ptr<Table> make_cpu_table(const Rule& rule) { return std::make_unique<CpuTable>(rule); }

}  // namespace gpumode::optim
