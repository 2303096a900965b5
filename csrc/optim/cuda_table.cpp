#ifdef GPUMODE_WITH_CUDA

#include "optim/cuda_table.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>

namespace gpumode::optim {
namespace {

// How many parameters one of the host's threads looks at, at least: to wake it takes 50 us.
constexpr int64_t kGrain = 500;

// Empty tensors have no memory, but gradients.
void* const kNoMemory = reinterpret_cast<void*>(uintptr_t{16});

void* memory_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->mutable_data(); }

template <class T>
T* address(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(memory_of(tensor)) : nullptr;
}

void throw_if_failed(const Status& status) { TORCH_CHECK(status.ok(), status.message); }

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

at::Tensor doubles_on(at::Device device, at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kDouble).device(device));
}

Kind kind_of(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? Kind::Double : Kind::Float;
}

}  // namespace

Batch& CudaTable::batch_of(size_t i) { return batches_[static_cast<int>(where_[i].kind)]; }

// Deals the parameters out to the kernels.
void CudaTable::assemble() {
  for (Batch& batch : batches_) batch.clear();
  where_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Kind kind = kind_of(params_[i].param);
    Batch& batch = batches_[static_cast<int>(kind)];
    where_.push_back({kind, static_cast<uint32_t>(batch.rows.size())});
    batch.add(static_cast<uint32_t>(i), params_[i].param);
    params_[i].is_new = true;
  }
  looks_.resize(params_.size());
}

// In three steps, each of which needs what the one before has fetched. Of those before `end`.
void CudaTable::fetch_ahead(size_t i, size_t end) const {
  constexpr size_t kFar = 18, kMiddle = 12, kNear = 6;
  if (i + kFar < end) {
    const Look& look = looks_[i + kFar];
    __builtin_prefetch(look.grad_slot);
    for (int k = 0; k < look.num_parts; ++k) {
      const auto* impl = reinterpret_cast<const char*>(look.parts[k].tensor);
      __builtin_prefetch(impl);
      __builtin_prefetch(impl + sizeof(c10::TensorImpl) - 40);
      __builtin_prefetch(look.parts[k].storage);
    }
  }
  if (i + kMiddle < end) {
    const at::Tensor& grad = grad_of(params_[i + kMiddle]);
    if (grad.defined()) {  // the beginning and the end of it
      const auto* impl = reinterpret_cast<const char*>(grad.unsafeGetTensorImpl());
      __builtin_prefetch(impl);
      __builtin_prefetch(impl + sizeof(c10::TensorImpl) - 40);
    }
  }
  if (i + kNear < end) {
    const at::Tensor& grad = grad_of(params_[i + kNear]);
    if (grad.defined()) {
      __builtin_prefetch(grad.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  }
}

bool CudaTable::is_as_seen(size_t i, const at::Tensor& grad) const {
  const Param& param = params_[i];
  const Look& look = looks_[i];
  if (param.is_new || grad.scalar_type() != look.grad_dtype || grad.device() != device_ ||
      grad.layout() != at::kStrided || grad.numel() != look.numel) {
    return false;
  }
  for (int k = 0; k < look.num_parts; ++k) {
    const auto& [tensor, storage, memory, offset] = look.parts[k];
    const c10::StorageImpl* now = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (now != storage || now->data() != memory || tensor->storage_offset() != offset ||
        (look.is_plain && !tensor->is_contiguous())) {
      return false;
    }
  }
  const at::Tensor& p = param.param;
  if (param.sizes != nullptr && p.sizes() != *param.sizes) return false;
  if (look.is_plain) return grad.is_contiguous() && grad.sizes() == p.sizes();
  const Batch& batch = batches_[static_cast<int>(where_[i].kind)];
  const Batch::Seen& seen = batch.seen[where_[i].row];
  return grad.sizes() == p.sizes() && grad.strides() == seen.grad_strides &&
         p.strides() == seen.param_strides;
}

void CudaTable::look_at(const Param& param, const at::Tensor& grad, const Operands& tensors,
                        Look* look) {
  *look = {};
  if (param.owner.defined()) look->grad_slot = &param.owner.unsafeGetTensorImpl()->grad();
  look->numel = param.param.numel();
  look->grad_dtype = grad.scalar_type();
  look->is_plain = std::all_of(tensors.begin(), tensors.end(),
                               [](const auto& each) { return each.first->is_contiguous(); });
  const auto add = [&](const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    look->parts[look->num_parts++] = {impl, storage, storage->data(), impl->storage_offset()};
  };
  for (const auto& [tensor, operand] : tensors) {
    if (tensor != &grad) add(*tensor);
  }
  if (!param.state) return;
  for (const at::Tensor& state : param.state->states) {
    if (state.defined() && state.scalar_type() == at::kByte) add(state);
  }
}

// Makes a row, and what is compared with it from now on.
void CudaTable::renew(size_t i, const at::Tensor& grad) {
  Param& param = params_[i];
  Batch& batch = batch_of(i);
  Row& row = batch.rows[where_[i].row];
  check(param, grad);
  TORCH_CHECK(row.numel == param.param.numel(), "a parameter had ", row.numel,
              " elements, and has ", param.param.numel());
  Job job;
  const Operands tensors = operands(&job, param, grad);
  std::deque<Layout> layouts;
  lay_out(&job, tensors, &layouts);

  row.group = static_cast<uint32_t>(param.group);
  row.number = static_cast<uint32_t>(param.number);
  if (param.state) {
    row.step = address<float>(param.state->step);
    row.scalar = address<float>(param.state->scalar);
  }
  Batch::Seen& seen = batch.seen[where_[i].row];
  seen.param_strides = param.param.strides().vec();
  seen.grad_strides = grad.strides().vec();
  batch.describe(where_[i].row, job, rule_);
  look_at(param, grad, tensors, &looks_[i]);
  param.is_new = false;
}

void* CudaTable::address_of(const at::Tensor& grad, size_t i, bool with_state) const {
  if (!grad.defined() || (with_state && !params_[i].state)) return nullptr;
  return grad.numel() == 0 ? kNoMemory : memory_of(grad);
}

// Looks at those from `begin` to `end`; adds to `changed` those of which more than the gradient's
// address is new.
void CudaTable::look_at_all(size_t begin, size_t end, bool with_state, Found* found) {
  for (size_t i = begin; i < end; ++i) {
    fetch_ahead(i, end);
    const at::Tensor& grad = grad_of(params_[i]);
    void* const memory = address_of(grad, i, with_state);
    if (memory != nullptr) {
      found->has_any = true;
      if (!is_as_seen(i, grad)) found->changed.push_back(i);
    }
    void*& known = batch_of(i).grads[where_[i].row];
    if (known == memory) continue;
    known = memory;
    found->grads_are_new[static_cast<int>(where_[i].kind)] = true;
  }
}

// Fails before anything on the device is changed, or not at all.
void CudaTable::collect(bool with_state) {
  if (where_.size() != params_.size()) assemble();
  Found all;
  std::mutex mutex;
  at::parallel_for(
      0, static_cast<int64_t>(params_.size()), kGrain, [&](int64_t begin, int64_t end) {
        Found found;
        look_at_all(static_cast<size_t>(begin), static_cast<size_t>(end), with_state, &found);
        const std::lock_guard<std::mutex> lock(mutex);
        all.has_any = all.has_any || found.has_any;
        for (int kind = 0; kind < kNumKinds; ++kind) {
          batches_[kind].grads_are_new = batches_[kind].grads_are_new || found.grads_are_new[kind];
        }
        all.changed.insert(all.changed.end(), found.changed.begin(), found.changed.end());
      });
  std::sort(all.changed.begin(), all.changed.end());  // so that of several errors the first is told
  for (const size_t i : all.changed) renew(i, grad_of(params_[i]));
  TORCH_CHECK(all.has_any || !is_capturing(),
              "no parameter has a gradient while a CUDA graph is captured, so that it would hold "
              "no step: expected backward() before, in the graph or in what it begins with");
}

Launch CudaTable::launch_of(Batch& batch, const Scale& scale) {
  Launch launch{};
  batch.upload(device_, &launch);
  launch.kind = static_cast<Kind>(&batch - batches_);
  launch.hyper = address<const double>(hyper_tensor_);
  launch.stochastic = stochastic_;
  launch.seed = seed_;
  launch.grad_scale = address<const float>(scale.grad_scale);
  launch.found_inf = address<const float>(scale.found_inf);
  launch.grad_sum = address<const double>(scale.grad_sum);
  launch.max_norm = scale.max_norm;
  return launch;
}

void CudaTable::run(const Pass& pass, const Scale& scale, bool is_last, const Sums& sums) {
  bool adds_to_total = false;
  for (Batch& batch : batches_) {
    if (batch.rows.empty()) continue;
    Launch launch = launch_of(batch, scale);
    launch.is_last_pass = is_last;
    launch.sums = address<double>(sums.each);
    at::Tensor partial_sums;
    if (!is_last) {
      const int64_t num_sums = sums.each.defined() ? batch.num_sums : int64_t{kMaxBlocks};
      partial_sums = doubles_on(device_, {num_sums, kMaxSums});
      launch.partial_sums = address<double>(partial_sums);
    }
    launch.total = address<double>(sums.total);
    launch.total_is_bad = address<float>(sums.is_bad);
    launch.adds_to_total = adds_to_total;
    throw_if_failed(pass.on_cuda(launch, current_stream()));
    adds_to_total = true;
  }
}

GradSums CudaTable::grad_sums(const Scale& scale, bool needs_each) {
  const c10::DeviceGuard guard(device_);
  collect(/*with_state=*/false);
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device_);
  Sums sums = {{}, doubles_on(device_, {}), at::empty({}, floats)};
  if (needs_each) {
    sums.each = doubles_on(device_, {static_cast<int64_t>(params_.size()), kMaxSums});
  }
  run(kGradNorm, {scale.grad_scale, {}, {}}, /*is_last=*/false, sums);
  return {needs_each ? sums.each.select(1, 0) : at::Tensor(), sums.total, sums.is_bad};
}

at::Tensor CudaTable::start(const Scale& scale) {
  const c10::DeviceGuard guard(device_);
  collect(/*with_state=*/true);
  Sums sums;
  if (rule_.passes.size() > 1) {
    sums.each = doubles_on(device_, {static_cast<int64_t>(params_.size()), kMaxSums});
  }
  for (size_t i = 0; i + 1 < rule_.passes.size(); ++i) {
    run(rule_.passes[i], scale, /*is_last=*/false, sums);
  }
  return sums.each;
}

void CudaTable::finish(const Scale& scale, const at::Tensor& sums) {
  const c10::DeviceGuard guard(device_);
  run(rule_.passes.back(), scale, /*is_last=*/true, {sums, {}, {}});
  at::parallel_for(0, static_cast<int64_t>(params_.size()), kGrain,
                   [&](int64_t begin, int64_t end) {
                     bump_versions(static_cast<size_t>(begin), static_cast<size_t>(end));
                   });
}

void CudaTable::bump_versions(size_t begin, size_t end) {
  constexpr size_t kFar = 16, kNear = 8;
  for (size_t i = begin; i < end; ++i) {  // as in fetch_ahead
    if (i + kFar < end) __builtin_prefetch(params_[i + kFar].param.unsafeGetTensorImpl());
    if (i + kNear < end) {
      const auto& version = params_[i + kNear].param.unsafeGetTensorImpl()->version_counter();
      __builtin_prefetch(*reinterpret_cast<const void* const*>(&version));
    }
    if (batch_of(i).grads[where_[i].row] != nullptr) bump_version(params_[i].param);
  }
}

bool CudaTable::was_recorded() const {
  return std::any_of(std::begin(batches_), std::end(batches_),
                     [](const Batch& batch) { return batch.device_grads.was_recorded(); });
}

std::unique_ptr<Table> make_cuda_table(const Rule& rule, at::Device device) {
  return std::make_unique<CudaTable>(rule, device);
}

}  // namespace gpumode::optim

#endif  // GPUMODE_WITH_CUDA
