#ifdef GPUMODE_WITH_CUDA

#include "optim/cuda_table.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

namespace gpumode::optim {
namespace {

// Tiles are as long as one stage of shared memory takes, unless there were too few of them for all
// multiprocessors. Measured: benchmarks/results/optim.md.
constexpr int64_t kStageBytes = int64_t{16} << 10;
constexpr int64_t kEnoughTiles = 4096;
constexpr int64_t kMaxGradsAtOnce = 4;
// Where tensors have many tiles, a pass that sums has them in units of several.
constexpr int64_t kManyTiles = 16;
constexpr uint32_t kTilesOfSum = 4;

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

Kind kind_of(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? Kind::Double : Kind::Float;
}

Form form_of(const Row& row) {
  for (int form = 1; form < kNumForms; ++form) {
    const FormDtypes& known = kFormDtypes[form];
    bool fits = row.param_dtype == known.param && row.grad_dtype == known.grad &&
                row.master_kind == known.master;
    for (int k = 0; k < kMaxStates; ++k) {
      fits = fits && (row.states[k] == nullptr || row.state_dtypes[k] == known.state);
    }
    if (fits) return static_cast<Form>(form);
  }
  return Form::Any;
}

bool has_blocks(const Row& row) {
  return std::count(std::begin(row.state_dtypes), std::end(row.state_dtypes), DType::U8) > 0;
}

// Of all the operands that a row has, but for the exponents of blocks.
int64_t bytes_of_element(const Row& row) {
  size_t nbytes = itemsize(row.param_dtype) + itemsize(row.grad_dtype);
  if (row.master_kind != Master::None) nbytes += itemsize(row.master_dtype);
  for (int k = 0; k < kMaxStates; ++k) {
    if (row.states[k] != nullptr) nbytes += itemsize(row.state_dtypes[k]);
  }
  return static_cast<int64_t>(nbytes);
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
  is_uploaded_by_graph_ = records;
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

bool DeviceCopy::is_of_a_graph() const { return is_uploaded_by_graph_ && !is_capturing(); }

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

// Decides what the tiles of each row are, and writes down whose each tile is.
void Batch::cut(at::Device device) {
  const auto sum_of_tiles = [&](int64_t length) {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0}, [&](int64_t sum, const Row& row) {
      return sum + num_tiles_of(row.numel, length);
    });
  };
  const int64_t max_units = std::max<int64_t>(1, sum_of_tiles(kTileUnit) / kEnoughTiles);
  int64_t total = 0, bytes_of_grads = 1;
  std::vector<uint32_t> all;
  stage_bytes = 128;
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    const int64_t nbytes = bytes_of_element(row);
    const int64_t units = std::clamp(kStageBytes / (nbytes * kTileUnit), int64_t{1}, max_units);
    const int64_t length = has_blocks(row) ? kTileOfBlocks : units * kTileUnit;
    const int64_t bytes_of_exponents = has_blocks(row) ? kMaxStates * length / kBlock : 0;
    const int64_t num_tiles_of_row = num_tiles_of(row.numel, length);
    row.first_tile = static_cast<uint32_t>(total);
    row.num_tiles = static_cast<uint32_t>(num_tiles_of_row);
    row.tile_length = static_cast<uint32_t>(length);
    total += num_tiles_of_row;
    TORCH_CHECK(total <= std::numeric_limits<int32_t>::max(),
                "the parameters have too many elements");
    all.insert(all.end(), row.num_tiles, static_cast<uint32_t>(i));
    stage_bytes = std::max(stage_bytes, length * nbytes + bytes_of_exponents);
    const auto of_grad = static_cast<int64_t>(itemsize(row.grad_dtype));
    bytes_of_grads = std::max(bytes_of_grads, length * of_grad);
  }
  // The rest of a tensor is left in as many parts as there are blocks that have units of it.
  tiles_of_sum = total < kManyTiles * static_cast<int64_t>(rows.size()) ? 1 : kTilesOfSum;
  num_sums = 0;
  for (Row& row : rows) {
    row.first_sum = num_sums;
    if (row.num_tiles > 1) num_sums += std::min(row.num_tiles / tiles_of_sum + 2, kMaxBlocks);
  }
  grads_at_once = std::clamp<int64_t>(stage_bytes / bytes_of_grads, 1, kMaxGradsAtOnce);
  num_tiles = static_cast<uint32_t>(total);
  row_of_tiles.upload(all.data(), int64_t{4} * num_tiles, device);
}

void Batch::upload(at::Device device) {
  if (num_tickets != rows.size() + 2 || tickets.is_of_a_graph()) {
    num_tickets = static_cast<uint32_t>(rows.size()) + 2;
    const std::vector<uint32_t> zeros(num_tickets);
    tickets.upload(zeros.data(), static_cast<int64_t>(num_tickets * sizeof(uint32_t)), device);
  }
  if (rows_are_new || device_rows.is_of_a_graph()) {
    cut(device);
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
  if (grads_are_new || is_capturing() || device_grads.is_of_a_graph()) {
    device_grads.upload(grads.data(), static_cast<int64_t>(grads.size() * sizeof(void*)), device);
  }
  rows_are_new = grads_are_new = false;
}

// -------------------------------------------------------------------------------------- CudaTable

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
      __builtin_prefetch(look.parts[k].tensor);
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
  const auto add = [&](const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    look->parts[look->num_parts++] = {impl, storage, storage->data()};
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
  row.form = form_of(row);
  bool is_vector = job.num_dims == 0;
  for (const auto& [tensor, operand] : tensors) {
    const bool fits = (operand->dtype == DType::F64) == (where_[i].kind == Kind::Double);
    const bool moves = operand == &job.grad;
    is_vector = is_vector && fits && (moves || is_aligned(operand->data));
  }
  for (const Operand& state : job.states) is_vector = is_vector && is_aligned(state.data);
  constexpr uint8_t kHalvesOfVector = 8;
  row.load_unit = !is_vector ? 0 : (has_blocks(row) ? kBlock : kHalvesOfVector);
  Batch::Seen& seen = batch.seen[where_[i].row];
  seen = {param.param.strides().vec(), grad.strides().vec(), {}};
  if (job.num_dims > 0) seen.layout = layout_of(job);
  look_at(param, grad, tensors, &looks_[i]);
  param.is_new = false;
  batch.rows_are_new = true;
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
  batch.upload(device_);
  Launch launch{};
  launch.rows = static_cast<const Row*>(batch.device_rows.address());
  launch.grads = static_cast<void* const*>(batch.device_grads.address());
  launch.num_rows = static_cast<uint32_t>(batch.rows.size());
  launch.row_of_tiles = static_cast<const uint32_t*>(batch.row_of_tiles.address());
  launch.num_tiles = batch.num_tiles;
  launch.stage_bytes = static_cast<uint32_t>(batch.stage_bytes);
  launch.grads_at_once = static_cast<uint32_t>(batch.grads_at_once);
  launch.tiles_of_sum = batch.tiles_of_sum;
  launch.kind = static_cast<Kind>(&batch - batches_);
  launch.hyper = address<const double>(hyper_tensor_);
  launch.stochastic = stochastic_;
  launch.seed = seed_;
  launch.grad_scale = address<const float>(scale.grad_scale);
  launch.found_inf = address<const float>(scale.found_inf);
  launch.grad_sum = address<const double>(scale.grad_sum);
  launch.max_norm = scale.max_norm;
  launch.tickets = static_cast<uint32_t*>(batch.tickets.address());
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
      partial_sums = doubles_on(device_, {batch.num_sums, kMaxSums});
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
