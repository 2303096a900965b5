#include "optim/table.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace gpumode::optim {
namespace {

// Small enough that all threads have work, large enough that handing it out costs nothing.
constexpr int64_t kPieceLength = int64_t{1} << 14;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::F16;
    case at::kBFloat16:
      return DType::BF16;
    case at::kDouble:
      return DType::F64;
    case at::kShort:
      return DType::I16;
    default:
      return DType::F32;
  }
}

Operand operand(const at::Tensor& tensor) {
  return {tensor.unsafeGetTensorImpl()->mutable_data(), nullptr, dtype_of(tensor)};
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

// Whether their elements lie in the same order, without gaps.
bool same_order(const at::Tensor& param, const at::Tensor& other) {
  return other.strides() == param.strides() || param.numel() <= 1 ||
         (param.is_contiguous() && other.is_contiguous());
}

void check_state(const at::Tensor& param, const at::Tensor& state, const char* what) {
  TORCH_CHECK(state.sizes() == param.sizes(), "the ", what, " of a parameter of shape ",
              param.sizes(), " has the shape ", state.sizes());
  TORCH_CHECK(state.device() == param.device(), "the ", what, " of a parameter on ", param.device(),
              " is on ", state.device());
  TORCH_CHECK(at::has_internal_overlap(state) != at::MemOverlap::Yes, "the ", what,
              " of a parameter shares memory with itself (an expanded tensor)");
}

}  // namespace

Table::Table(const std::string& rule_name) : rule_(rule(rule_name)) {}

int64_t Table::add(const at::Tensor& param, const at::Tensor& owner, int64_t group) {
  params_.push_back({param, owner, {}, group, std::nullopt});
  return static_cast<int64_t>(params_.size()) - 1;
}

void Table::set_state(int64_t index, ParamState state) {
  TORCH_INTERNAL_ASSERT(state.states.size() == static_cast<size_t>(rule_.num_states));
  params_.at(static_cast<size_t>(index)).state = std::move(state);
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
  return found;
}

void Table::step(const StepOptions& options) {
  collect_jobs();
  cut();
  run(options);
}

void Table::check(const Param& param, const at::Tensor& grad) const {
  const at::Tensor& p = param.param;
  TORCH_CHECK(grad.layout() == at::kStrided, "sparse gradients are not supported: that of a ",
              "parameter of shape ", p.sizes(), " has the layout ", grad.layout());
  TORCH_CHECK(grad.device() == p.device(), "the gradient of a parameter on ", p.device(), " is on ",
              grad.device());
  TORCH_CHECK(is_supported(grad.scalar_type()), "the gradient of a parameter of shape ", p.sizes(),
              " is of ", grad.scalar_type(), "; expected float32, bfloat16, float16 or float64");
  TORCH_CHECK(grad.sizes() == p.sizes(), "the gradient of a parameter of shape ", p.sizes(),
              " has the shape ", grad.sizes());
  TORCH_CHECK(at::has_internal_overlap(p) != at::MemOverlap::Yes, "a parameter of shape ",
              p.sizes(), " shares memory with itself (an expanded tensor)");
  for (const at::Tensor& state : param.state->states) {
    if (state.defined()) check_state(p, state, "state");
  }
  if (param.state->master.defined()) check_state(p, param.state->master, "master");
}

// Whether all that belongs to a parameter is contiguous, and so needs no further look.
bool Table::is_plain(const Param& param, const at::Tensor& grad) const {
  const at::Tensor& p = param.param;
  const auto fits = [&](const at::Tensor& other) {
    return !other.defined() ||
           (other.is_contiguous() && other.sizes() == p.sizes() && other.device() == p.device());
  };
  if (!p.is_contiguous() || grad.layout() != at::kStrided || !fits(grad) ||
      !is_supported(grad.scalar_type()) || !fits(param.state->master)) {
    return false;
  }
  return std::all_of(param.state->states.begin(), param.state->states.end(), fits);
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
    if (!is_plain) lay_out(&job, param, grad);
  }
}

void Table::fill(Job* job, const Param& param, const at::Tensor& grad) {
  const ParamState& state = *param.state;
  const Group& group = groups_.at(static_cast<size_t>(param.group));
  job->numel = param.param.numel();
  job->hyper = group.hyper.data();
  job->stochastic = group.stochastic;
  job->seed = group.seed;
  job->step = static_cast<double>(*state.step.const_data_ptr<float>()) + 1.0;
  if (state.scalar.defined()) job->scalar = *state.scalar.const_data_ptr<float>();
  job->param = operand(param.param);
  job->grad = operand(grad);
  job->master_kind = state.master_kind;
  if (state.master.defined()) job->master = operand(state.master);
  for (int k = 0; k < rule_.num_states; ++k) {
    if (state.states[k].defined()) job->states[k] = operand(state.states[k]);
  }
}

// Gives a job dimensions, unless all its tensors' elements lie in the same order. The outermost is
// the one whose elements lie farthest apart in the parameter, and neighbours that can be walked as
// one are merged.
void Table::lay_out(Job* job, const Param& param, const at::Tensor& grad) {
  std::vector<std::pair<const at::Tensor*, Operand*>> all = {{&param.param, &job->param},
                                                             {&grad, &job->grad}};
  if (param.state->master.defined()) all.emplace_back(&param.state->master, &job->master);
  for (int k = 0; k < rule_.num_states; ++k) {
    const at::Tensor& state = param.state->states[k];
    if (state.defined()) all.emplace_back(&state, &job->states[k]);
  }
  const at::Tensor& p = param.param;
  const bool same = std::all_of(all.begin(), all.end(),
                                [&](const auto& one) { return same_order(p, *one.first); });
  if (job->numel == 0 || (same && p.is_non_overlapping_and_dense())) return;

  std::vector<int64_t> order(static_cast<size_t>(p.dim()));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return p.stride(a) > p.stride(b); });
  Layout& layout = layouts_.emplace_back();
  for (const int64_t d : order) {
    const int64_t size = p.size(d);
    if (size == 1) continue;
    bool merges = !layout.sizes.empty();
    for (size_t o = 0; o < all.size() && merges; ++o) {
      merges = layout.strides[o].back() == all[o].first->stride(d) * size;
    }
    if (merges) layout.sizes.back() *= size;
    if (!merges) layout.sizes.push_back(size);
    for (size_t o = 0; o < all.size(); ++o) {
      if (merges) layout.strides[o].pop_back();
      layout.strides[o].push_back(all[o].first->stride(d));
    }
  }
  TORCH_CHECK(layout.sizes.size() <= kMaxDims, "a parameter of ", p.dim(),
              " dimensions, which lie in another order than those of its gradient or states: "
              "expected at most ",
              kMaxDims);
  job->num_dims = static_cast<int>(layout.sizes.size());
  job->sizes = layout.sizes.data();
  for (size_t o = 0; o < all.size(); ++o) all[o].second->strides = layout.strides[o].data();
}

void Table::cut() {
  pieces_.clear();
  for (const Job& job : jobs_) {
    for (int64_t begin = 0; begin < job.numel; begin += kPieceLength) {
      pieces_.push_back({&job, begin, std::min(kPieceLength, job.numel - begin)});
    }
  }
  sums_.resize(pieces_.size() * kMaxSums);
}

void Table::run(const StepOptions& options) {
  int64_t numel = 0;
  for (const Job& job : jobs_) numel += job.numel;
  const auto num_pieces = static_cast<int64_t>(pieces_.size());
  const int64_t grain =
      numel == 0 ? 1 : std::max<int64_t>(1, 2 * kPieceLength * num_pieces / numel);
  for (size_t pass = 0; pass < rule_.passes.size(); ++pass) {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    at::parallel_for(0, num_pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        rule_.passes[pass](pieces_[i], options, &sums_[i * kMaxSums]);
      }
    });
    if (pass + 1 == rule_.passes.size()) break;
    // In the order of the pieces, whichever threads had them.
    for (Job& job : jobs_) std::fill_n(job.sums, kMaxSums, 0.0);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      auto& job = const_cast<Job&>(*pieces_[i].job);
      for (int k = 0; k < kMaxSums; ++k) job.sums[k] += sums_[i * kMaxSums + k];
    }
  }
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const ParamState& state = *job_params_[i]->state;
    *state.step.mutable_data_ptr<float>() += 1.0f;
    // Autograd notices that a tensor it has saved was changed.
    if (!job_params_[i]->param.is_inference()) {
      job_params_[i]->param.unsafeGetTensorImpl()->bump_version();
    }
    if (rule_.next_scalar == nullptr) continue;
    *state.scalar.mutable_data_ptr<float>() = static_cast<float>(rule_.next_scalar(jobs_[i]));
  }
}

}  // namespace gpumode::optim
