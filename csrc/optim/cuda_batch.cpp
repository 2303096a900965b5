#ifdef GPUMODE_WITH_CUDA

#include "optim/cuda_batch.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace gpumode::optim {
namespace {

// Tiles are as long as one stage of shared memory takes, unless there were too few of them for all
// multiprocessors. Measured: benchmarks/results/optim.md.
constexpr int64_t kStageBytes = int64_t{16} << 10;
constexpr int64_t kEnoughTiles = 4096;
constexpr int64_t kMaxGradsAtOnce = 4;
// Where tensors have many tiles, a pass that sums has them in units of several, unless there were
// too few of those.
constexpr int64_t kManyTiles = 16;
constexpr int64_t kMaxTilesOfSum = 16;

at::Tensor bytes_on(at::Device device, int64_t nbytes) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

int64_t num_tiles_of(int64_t numel, int64_t length) {
  return std::max<int64_t>(1, (numel + length - 1) / length);
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

Form form_of(const Row& row, const Rule& rule) {
  int num_usual_states = 0;
  for (const Pass& pass : rule.passes) {
    num_usual_states = std::max(num_usual_states, pass.num_usual_states);
  }
  for (int form = 1; form < kNumForms; ++form) {
    const FormDtypes& known = kFormDtypes[form];
    bool fits = row.param_dtype == known.param && row.grad_dtype == known.grad &&
                row.master_kind == known.master;
    for (int k = 0; k < kMaxStates; ++k) {
      const bool is_there = row.states[k] != nullptr;
      fits = fits && (!is_there || row.state_dtypes[k] == known.state);
      if (known.state == DType::U8) fits = fits && is_there == (k < num_usual_states);
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

// Row::load_unit.
uint8_t load_unit_of(const Job& job, bool has_blocks) {
  constexpr uint8_t kHalvesOfVector = 8;
  bool is_vector = job.num_dims == 0;
  const bool is_double = job.param.dtype == DType::F64;
  for (const Operand* operand :
       {&job.param, &job.grad, &job.master, &job.states[0], &job.states[1], &job.states[2]}) {
    if (operand->data == nullptr) continue;
    const bool fits = (operand->dtype == DType::F64) == is_double;
    const bool moves = operand == &job.grad;
    is_vector = is_vector && fits && (moves || is_aligned(operand->data));
  }
  return !is_vector ? 0 : (has_blocks ? kBlock : kHalvesOfVector);
}

}  // namespace

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

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
    const Status status = copy_by_value(tensor_.mutable_data_ptr(), data, nbytes,
                                        c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(status.ok(), status.message);
    return;
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
  const bool have_many = total >= kManyTiles * static_cast<int64_t>(rows.size());
  const int64_t tiles_of_unit = have_many ? total / kEnoughTiles : 1;
  tiles_of_sum = static_cast<uint32_t>(std::clamp(tiles_of_unit, int64_t{1}, kMaxTilesOfSum));
  num_sums = 0;
  for (Row& row : rows) {
    row.first_sum = num_sums;
    if (row.num_tiles > 1) num_sums += std::min(row.num_tiles / tiles_of_sum + 2, kMaxBlocks);
  }
  grads_at_once = std::clamp<int64_t>(stage_bytes / bytes_of_grads, 1, kMaxGradsAtOnce);
  num_tiles = static_cast<uint32_t>(total);
  row_of_tiles.upload(all.data(), int64_t{4} * num_tiles, device);
}

void Batch::describe(size_t i, const Job& job, const Rule& rule) {
  Row& row = rows[i];
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
  row.form = form_of(row, rule);
  row.load_unit = load_unit_of(job, has_blocks(row));
  seen[i].layout = job.num_dims > 0 ? layout_of(job) : std::vector<int64_t>();
  rows_are_new = true;
}

void Batch::upload(at::Device device, Launch* launch) {
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
  launch->rows = static_cast<const Row*>(device_rows.address());
  launch->grads = static_cast<void* const*>(device_grads.address());
  launch->num_rows = static_cast<uint32_t>(rows.size());
  launch->row_of_tiles = static_cast<const uint32_t*>(row_of_tiles.address());
  launch->num_tiles = num_tiles;
  launch->stage_bytes = static_cast<uint32_t>(stage_bytes);
  launch->grads_at_once = static_cast<uint32_t>(grads_at_once);
  launch->tiles_of_sum = tiles_of_sum;
  launch->tickets = static_cast<uint32_t*>(tickets.address());
}

}  // namespace gpumode::optim

#endif  // GPUMODE_WITH_CUDA
