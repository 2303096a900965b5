#ifdef GPUMODE_WITH_CUDA

#include "optim/cuda_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace gpumode::optim {
namespace {

// Tiles are long, so that a block has much to do after it has found out what, unless there were too
// few of them for all multiprocessors. Measured: benchmarks/results/optim.md.
constexpr int64_t kEnoughTiles = 4096;
constexpr int64_t kMaxStrides[kNumKinds] = {8, 16, 8};

// Empty tensors have no memory, but gradients.
void* const kNoMemory = reinterpret_cast<void*>(uintptr_t{16});

void* memory_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->mutable_data(); }

template <class T>
T* address(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(memory_of(tensor)) : nullptr;
}

void throw_if_failed(const Status& status) { TORCH_CHECK(status.ok(), status.message); }

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

at::Tensor bytes_on(at::Device device, int64_t nbytes) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor doubles_on(at::Device device, at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kDouble).device(device));
}

int64_t num_tiles_of(int64_t numel, int64_t length) {
  return std::max<int64_t>(1, (numel + length - 1) / length);
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// What can be told from a parameter alone.
Kind kind_of(at::ScalarType param) {
  if (param == at::kDouble) return Kind::Float64;
  return param == at::kFloat ? Kind::Float32 : Kind::Mixed;
}

// Row::layout of a job whose tensors lie in different orders.
std::vector<int64_t> layout_of(const Job& job) {
  std::vector<int64_t> layout = {job.num_dims};
  layout.insert(layout.end(), job.sizes, job.sizes + job.num_dims);
  for (const Operand* operand :
       {&job.param, &job.grad, &job.master, &job.states[0], &job.states[1], &job.states[2]}) {
    for (int d = 0; d < job.num_dims; ++d) {
      layout.push_back(operand->strides == nullptr ? 0 : operand->strides[d]);
    }
  }
  return layout;
}

}  // namespace

// ------------------------------------------------------------------------------------- DeviceCopy

void DeviceCopy::upload(const void* data, int64_t nbytes, at::Device device) {
  if (nbytes == 0) return;
  const bool records = is_capturing();
  if (is_recorded_ && tensor_.defined()) recorded_.push_back(tensor_);
  if (records || is_recorded_ || !tensor_.defined() || tensor_.numel() != nbytes) {
    tensor_ = bytes_on(device, nbytes);
    is_recorded_ = records;
  }
  if (records) {
    return throw_if_failed(
        copy_by_value(tensor_.mutable_data_ptr(), data, nbytes, current_stream()));
  }
  // torch keeps pinned memory until the copy has been made.
  const at::Tensor staged =
      at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(staged.mutable_data_ptr(), data, static_cast<size_t>(nbytes));
  tensor_.copy_(staged, /*non_blocking=*/true);
}

void* DeviceCopy::address() {
  if (!tensor_.defined()) return nullptr;
  is_recorded_ = is_recorded_ || is_capturing();
  return tensor_.mutable_data_ptr();
}

// ------------------------------------------------------------------------------------------ Batch

void Batch::clear() {
  rows.clear();
  grads.clear();
  seen.clear();
  rows_are_new = grads_are_new = true;
}

void Batch::add(uint32_t index, const at::Tensor& param) {
  Row& row = rows.emplace_back();
  row = {};
  row.index = index;
  row.numel = param.numel();
  grads.push_back(nullptr);
  seen.emplace_back();
}

void Batch::cut(at::Device device, int64_t max_strides) {
  const auto count = [&](int64_t length) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0}, [&](int64_t sum, const Row& row) {
      return sum + num_tiles_of(row.numel, length);
    });
  };
  tile_length = std::clamp(count(kStride) / kEnoughTiles, int64_t{1}, max_strides) * kStride;
  const int64_t total = count(tile_length);
  TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(),
              "the parameters have too many elements");
  num_tiles = static_cast<uint32_t>(total);

  std::vector<uint32_t> all;
  all.reserve(num_tiles);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].first_tile = static_cast<uint32_t>(all.size());
    all.insert(all.end(), static_cast<size_t>(num_tiles_of(rows[i].numel, tile_length)),
               static_cast<uint32_t>(i));
  }
  row_of_tiles.upload(all.data(), int64_t{4} * num_tiles, device);
  tickets = at::zeros({static_cast<int64_t>(rows.size()) + 1},
                      at::TensorOptions().dtype(at::kInt).device(device));
}

void Batch::upload(at::Device device) {
  if (rows_are_new) {
    std::vector<int64_t> all;
    for (const Seen& each : seen) all.insert(all.end(), each.layout.begin(), each.layout.end());
    layouts.upload(all.data(), static_cast<int64_t>(all.size() * sizeof(int64_t)), device);
    const auto* layout = static_cast<const int64_t*>(layouts.address());
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].layout = seen[i].layout.empty() ? nullptr : layout;
      if (layout != nullptr) layout += seen[i].layout.size();
    }
    device_rows.upload(rows.data(), static_cast<int64_t>(rows.size() * sizeof(Row)), device);
  }
  if (grads_are_new || is_capturing()) {
    device_grads.upload(grads.data(), static_cast<int64_t>(grads.size() * sizeof(void*)), device);
  }
  rows_are_new = grads_are_new = false;
}

// -------------------------------------------------------------------------------------- CudaTable

Batch& CudaTable::batch_of(size_t i) { return batches_[static_cast<int>(where_[i].kind)]; }

// Deals the parameters out to the kernels.
void CudaTable::assemble() {
  for (size_t i = kinds_.size(); i < params_.size(); ++i) {
    kinds_.push_back(kind_of(params_[i].param.scalar_type()));
  }
  for (Batch& batch : batches_) batch.clear();
  where_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    Batch& batch = batches_[static_cast<int>(kinds_[i])];
    where_.push_back({kinds_[i], static_cast<uint32_t>(batch.rows.size())});
    batch.add(static_cast<uint32_t>(i), params_[i].param);
    params_[i].is_new = true;
  }
  looks_.resize(params_.size());
  for (int kind = 0; kind < kNumKinds; ++kind) batches_[kind].cut(device_, kMaxStrides[kind]);
}

// In three steps, each of which needs what the one before has fetched.
void CudaTable::fetch_ahead(size_t i) const {
  constexpr size_t kFar = 18, kMiddle = 12, kNear = 6;
  if (i + kFar < looks_.size()) {
    const Look& look = looks_[i + kFar];
    __builtin_prefetch(look.grad_slot);
    for (int k = 0; k < look.num_parts; ++k) {
      __builtin_prefetch(look.parts[k].tensor);
      __builtin_prefetch(look.parts[k].storage);
    }
  }
  if (i + kMiddle < params_.size()) {
    const at::Tensor& grad = grad_of(params_[i + kMiddle]);
    if (grad.defined()) {  // the beginning and the end of it
      const auto* impl = reinterpret_cast<const char*>(grad.unsafeGetTensorImpl());
      __builtin_prefetch(impl);
      __builtin_prefetch(impl + sizeof(c10::TensorImpl) - 40);
    }
  }
  if (i + kNear < params_.size()) {
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
    const auto& [tensor, storage, memory] = look.parts[k];
    const c10::StorageImpl* now = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (now != storage || now->data() != memory) return false;
  }
  if (look.is_plain) return grad.is_contiguous();
  const at::Tensor& p = param.param;
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
  for (const auto& [tensor, operand] : tensors) {
    if (tensor == &grad) continue;
    const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    look->parts[look->num_parts++] = {impl, storage, storage->data()};
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
  row.param = job.param.data;
  row.param_dtype = job.param.dtype;
  row.grad_dtype = job.grad.dtype;
  row.master = job.master.data;
  row.master_dtype = job.master.dtype;
  row.master_kind = job.master_kind;
  for (int k = 0; k < kMaxStates; ++k) {
    row.states[k] = job.states[k].data;
    row.state_dtypes[k] = job.states[k].dtype;
  }
  if (param.state) {
    row.step = address<float>(param.state->step);
    row.scalar = address<float>(param.state->scalar);
  }
  Kind kind = kind_of(param.param.scalar_type());
  row.is_vector = job.num_dims == 0;
  for (const auto& [tensor, operand] : tensors) {
    const bool fits = (operand->dtype == DType::F64) == (kind == Kind::Float64);
    const bool moves = operand == &job.grad;
    row.is_vector = row.is_vector && fits && (moves || is_aligned(operand->data));
    if (kind == Kind::Float32 && operand->dtype != DType::F32) kind = Kind::Mixed;
  }
  kinds_[i] = kind;
  Batch::Seen& seen = batch.seen[where_[i].row];
  seen = {param.param.strides().vec(), grad.strides().vec(), {}};
  if (job.num_dims > 0) seen.layout = layout_of(job);
  look_at(param, grad, tensors, &looks_[i]);
  param.is_new = false;
  batch.rows_are_new = true;
}

// Returns whether all parameters are where their kind belongs. Fails before anything on the device
// is changed, or not at all.
bool CudaTable::collect_once(bool with_state) {
  bool has_any = false, fits = true;
  for (size_t i = 0; i < params_.size(); ++i) {
    fetch_ahead(i);
    const at::Tensor& grad = grad_of(params_[i]);
    void* memory = nullptr;
    if (grad.defined() && (params_[i].state || !with_state)) {
      has_any = true;
      if (!is_as_seen(i, grad)) renew(i, grad);
      fits = fits && kinds_[i] == where_[i].kind;
      memory = grad.numel() == 0 ? kNoMemory : memory_of(grad);
    }
    Batch& batch = batch_of(i);
    if (batch.grads[where_[i].row] == memory) continue;
    batch.grads[where_[i].row] = memory;
    batch.grads_are_new = true;
  }
  TORCH_CHECK(has_any || !is_capturing(),
              "no parameter has a gradient while a CUDA graph is captured, so that it would hold "
              "no step: expected backward() before, in the graph or in what it begins with");
  return fits;
}

void CudaTable::collect(bool with_state) {
  if (where_.size() != params_.size()) assemble();
  if (collect_once(with_state)) return;
  assemble();
  collect_once(with_state);
}

Launch CudaTable::launch_of(Batch& batch, const Scale& scale) {
  batch.upload(device_);
  Launch launch{};
  launch.rows = static_cast<const Row*>(batch.device_rows.address());
  launch.grads = static_cast<void* const*>(batch.device_grads.address());
  launch.num_rows = static_cast<uint32_t>(batch.rows.size());
  launch.row_of_tiles = static_cast<const uint32_t*>(batch.row_of_tiles.address());
  launch.num_tiles = batch.num_tiles;
  launch.tile_length = batch.tile_length;
  launch.kind = static_cast<Kind>(&batch - batches_);
  launch.hyper = address<const double>(hyper_tensor_);
  launch.stochastic = stochastic_;
  launch.seed = seed_;
  launch.grad_scale = address<const float>(scale.grad_scale);
  launch.found_inf = address<const float>(scale.found_inf);
  launch.grad_sum = address<const double>(scale.grad_sum);
  launch.max_norm = scale.max_norm;
  launch.tickets = address<uint32_t>(batch.tickets);
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
    if (!is_last && sums.each.defined()) {
      partial_sums = doubles_on(device_, {batch.num_tiles, kMaxSums});
      launch.partial_sums = address<double>(partial_sums);
    }
    launch.total = address<double>(sums.total);
    launch.total_is_bad = address<float>(sums.is_bad);
    launch.adds_to_total = adds_to_total;
    throw_if_failed(pass.on_cuda(launch, current_stream()));
    adds_to_total = true;
  }
}

GradSums CudaTable::grad_sums(const Scale& scale) {
  const c10::DeviceGuard guard(device_);
  collect(/*with_state=*/false);
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device_);
  Sums sums = {doubles_on(device_, {static_cast<int64_t>(params_.size()), kMaxSums}),
               doubles_on(device_, {}), at::empty({}, floats)};
  run(kGradNorm, {scale.grad_scale, {}, {}}, /*is_last=*/false, sums);
  return {sums.each.select(1, 0), sums.total, sums.is_bad};
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
  constexpr size_t kFar = 16, kNear = 8;
  for (size_t i = 0; i < params_.size(); ++i) {  // as in fetch_ahead
    if (i + kFar < params_.size()) {
      __builtin_prefetch(params_[i + kFar].param.unsafeGetTensorImpl());
    }
    if (i + kNear < params_.size()) {
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
