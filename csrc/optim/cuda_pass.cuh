#pragma once

#include <cuda_runtime.h>

#include <new>
#include <string>
#include <type_traits>

#include "optim/cuda_pass.h"
#include "optim/cuda_values.cuh"
#include "optim/grads.h"

// The kernel of a pass. A block updates one tile of one tensor: all its loads are on their way
// before thread 0 makes the update out of hyper-parameters and step, and so hide that.
namespace gpumode::optim {

constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;

// What a block shares.
template <class T, class Update>
struct Shared {
  Row row;
  alignas(alignof(Update)) unsigned char update[sizeof(Update)];
  T factor;
  uint32_t keys[1 + kMaxStates];  // of random bits: for the parameter, and for the states
  bool skips;

  __device__ const Update& get_update() const { return *reinterpret_cast<const Update*>(update); }
};

template <class Update>
__device__ Job job_of(const Launch& launch, const Row& row) {
  Job job;
  job.numel = row.numel;
  job.hyper = launch.hyper + row.group * kMaxHyper;
  // Volatile: the last block changes them.
  if (row.step != nullptr) job.step = static_cast<double>(*const_cast<volatile float*>(row.step));
  job.step += 1.0;
  if (row.scalar != nullptr) job.scalar = *const_cast<volatile float*>(row.scalar);
  if ((Update::kAccess & kIsOfItsTensor) != 0 && launch.sums != nullptr) {
    for (int k = 0; k < kMaxSums; ++k) job.sums[k] = launch.sums[row.index * kMaxSums + k];
  }
  return job;
}

// What thread 0 makes for its block.
template <class T, class Update>
__device__ void prepare(const Launch& launch, Shared<T, Update>* shared) {
  const Row& row = shared->row;
  const Job job = job_of<Update>(launch, row);
  new (shared->update) Update(job);
  double factor =
      launch.grad_scale == nullptr ? 1.0 : 1.0 / static_cast<double>(*launch.grad_scale);
  if (launch.grad_sum != nullptr) {
    factor *= clip_coefficient(root(*launch.grad_sum), launch.max_norm);
  }
  shared->factor = static_cast<T>(factor);
  shared->skips = launch.found_inf != nullptr && *launch.found_inf != 0.0f;
  if (!launch.stochastic) return;
  for (uint32_t operand = 0; operand <= kMaxStates; ++operand) {
    shared->keys[operand] =
        random_key(launch.seed, static_cast<uint64_t>(job.step), row.number, operand);
  }
}

// ---------------------------------------------------------------------------------- as vectors

// The dtype of an operand, known to the compiler unless they are mixed.
template <Kind kKind>
__device__ DType dtype_as(DType dtype) {
  if (kKind == Kind::Float32) return DType::F32;
  return kKind == Kind::Float64 ? DType::F64 : dtype;
}

// What a thread has of a tile at a time: a vector of each operand, as they were loaded.
template <Kind kKind, class T, class Update>
struct Loaded {
  using Vector = typename VectorOf<T>::Type;
  Vector param, master, grad, states[Update::kNumStates + 1];

  __device__ void load_all(const Row& row, const void* grad_memory, int64_t first) {
    if (Update::kAccess & kReadsParam) {
      load(&param, row.param, dtype_as<kKind>(row.param_dtype), first);
      if (kKind == Kind::Mixed && row.master_kind != Master::None) {
        load(&master, row.master, row.master_dtype, first);
      }
    }
    if (Update::kAccess & kReadsGrad) {
      load(&grad, grad_memory, dtype_as<kKind>(row.grad_dtype), first);
    }
#pragma unroll
    for (int k = 0; k < Update::kNumStates; ++k) {
      states[k] = {};
      if (row.states[k] == nullptr) continue;
      load(&states[k], row.states[k], dtype_as<kKind>(row.state_dtypes[k]), first);
    }
  }
};

// The values that are updated, in registers.
template <class T, class Update>
struct Values {
  T param[kPerThread], grad[kPerThread], states[Update::kNumStates + 1][kPerThread];
};

// The exact value of a parameter in half precision. Where it is not what was rounded from its
// master, somebody has written it since.
__device__ inline float exact(const Row& row, uint16_t half, float master) {
  const bool is_bf16 = row.param_dtype == DType::BF16;
  if (half == (is_bf16 ? BF16::narrow(master) : F16::narrow(master))) return master;
  return is_bf16 ? BF16::widen(half) : F16::widen(half);
}

__device__ inline void master_values(const Row& row, const FloatVector& param,
                                     const FloatVector& master, float (&values)[kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (row.master_kind == Master::F32) {
      values[i] = exact(row, param.half(i), float_of(master.words[i]));
    } else {
      values[i] = join(param.half(i), static_cast<int16_t>(master.half(i)));
    }
  }
}

template <Kind kKind, class T, class Update>
__device__ Values<T, Update> take(const Row& row, const Loaded<kKind, T, Update>& from) {
  Values<T, Update> values{};
  if (Update::kAccess & kReadsParam) {
    widen(from.param, dtype_as<kKind>(row.param_dtype), values.param);
    if constexpr (kKind == Kind::Mixed) {
      if (row.master_kind != Master::None) {
        master_values(row, from.param, from.master, values.param);
      }
    }
  }
  if (Update::kAccess & kReadsGrad) {
    widen(from.grad, dtype_as<kKind>(row.grad_dtype), values.grad);
  }
#pragma unroll
  for (int k = 0; k < Update::kNumStates; ++k) {
    widen(from.states[k], dtype_as<kKind>(row.state_dtypes[k]), values.states[k]);
  }
  return values;
}

// The parameter and its master.
__device__ inline void store_master(const Row& row, int64_t first,
                                    const float (&values)[kPerThread]) {
  constexpr Rounding kToNearest{};
  if (row.master_kind == Master::F32) {
    store(row.master, DType::F32, first, narrow(DType::F32, values, kToNearest, first));
    store(row.param, row.param_dtype, first, narrow(row.param_dtype, values, kToNearest, first));
    return;
  }
  uint16_t high[kPerThread], low[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    int16_t remainder;
    split(values[i], &high[i], &remainder);
    low[i] = static_cast<uint16_t>(remainder);
  }
  store(row.param, row.param_dtype, first, pack(high));
  store(row.master, row.master_dtype, first, pack(low));
}

// Updates kPerThread values, and adds their terms to `sums`.
template <Kind kKind, class T, class Update>
__device__ void update_all(const Launch& launch, const Shared<T, Update>& shared, int64_t first,
                           Values<T, Update> values, double* sums) {
  constexpr int kStates = Update::kNumStates, kSums = Update::kNumSums;
  constexpr unsigned kAccess = Update::kAccess;
  const Row& row = shared.row;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    T states[kStates + 1], terms[kSums + 1];
#pragma unroll
    for (int k = 0; k < kStates; ++k) states[k] = values.states[k][i];
    shared.get_update()(values.param[i], values.grad[i] * shared.factor, states, terms);
#pragma unroll
    for (int k = 0; k < kStates; ++k) values.states[k][i] = states[k];
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += static_cast<double>(terms[k]);
  }
  if (kAccess & kWritesParam) {
    bool has_master = false;
    if constexpr (kKind == Kind::Mixed) {
      has_master = row.master_kind != Master::None;
      if (has_master) store_master(row, first, values.param);
    }
    if (!has_master) {
      const DType dtype = dtype_as<kKind>(row.param_dtype);
      const Rounding rounding = {launch.stochastic, shared.keys[0]};
      store(row.param, dtype, first, narrow(dtype, values.param, rounding, first));
    }
  }
  if (kAccess & kWritesStates) {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (row.states[k] == nullptr) continue;
      const DType dtype = dtype_as<kKind>(row.state_dtypes[k]);
      const Rounding rounding = {launch.stochastic, shared.keys[1 + k]};
      store(row.states[k], dtype, first, narrow(dtype, values.states[k], rounding, first));
    }
  }
}

// ------------------------------------------------------------------------------------- one by one

template <class Update>
struct Sums {
  double values[Update::kNumSums + 1];
};

template <class T>
__device__ T param_value(const Row& row, int64_t at, int64_t master_at) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (row.master_kind != Master::None) {
      const uint16_t half = static_cast<const uint16_t*>(row.param)[at];
      if (row.master_kind == Master::Remainder16) {
        return join(half, static_cast<const int16_t*>(row.master)[master_at]);
      }
      return exact(row, half, static_cast<const float*>(row.master)[master_at]);
    }
  }
  return load_one<T>(row.param, row.param_dtype, at);
}

template <class T>
__device__ void store_param_value(const Row& row, int64_t at, int64_t master_at, int64_t index,
                                  T value, Rounding rounding) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (row.master_kind == Master::Remainder16) {
      split(value, static_cast<uint16_t*>(row.param) + at,
            static_cast<int16_t*>(row.master) + master_at);
      return;
    }
    if (row.master_kind == Master::F32) {
      rounding.stochastic = false;
      static_cast<float*>(row.master)[master_at] = value;
    }
  }
  store_one(row.param, row.param_dtype, at, value, rounding, index);
}

// The same for the elements from `first` to `last`, whatever lies how. Not inlined, so that it
// costs the others no registers.
template <class T, class Update>
__device__ __noinline__ Sums<Update> update_slowly(const Launch& launch,
                                                   const Shared<T, Update>& shared,
                                                   const void* grad, int64_t first, int64_t last) {
  constexpr int kStates = Update::kNumStates;
  constexpr unsigned kAccess = Update::kAccess;
  const Row& row = shared.row;
  Sums<Update> sums{};
#pragma unroll 1
  for (int64_t index = first; index < last; ++index) {
    const auto at = [&](int operand) { return offset_of(row.layout, operand, index); };
    const int64_t param_at = at(kParamOperand);
    const int64_t master_at = row.master == nullptr ? 0 : at(kMasterOperand);
    T p{}, g{}, states[kStates + 1], terms[Update::kNumSums + 1];
    if (kAccess & kReadsParam) p = param_value<T>(row, param_at, master_at);
    if (kAccess & kReadsGrad) g = load_one<T>(grad, row.grad_dtype, at(kGradOperand));
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      states[k] = T(0);
      if (row.states[k] == nullptr) continue;
      states[k] = load_one<T>(row.states[k], row.state_dtypes[k], at(kStateOperand + k));
    }
    shared.get_update()(p, g * shared.factor, states, terms);
#pragma unroll
    for (int k = 0; k < Update::kNumSums; ++k) sums.values[k] += static_cast<double>(terms[k]);
    if (kAccess & kWritesParam) {
      const Rounding rounding = {launch.stochastic, shared.keys[0]};
      store_param_value(row, param_at, master_at, index, p, rounding);
    }
#pragma unroll
    for (int k = 0; k < kStates && kAccess & kWritesStates; ++k) {
      if (row.states[k] == nullptr) continue;
      store_one(row.states[k], row.state_dtypes[k], at(kStateOperand + k), states[k],
                {launch.stochastic, shared.keys[1 + k]}, index);
    }
  }
  return sums;
}

// --------------------------------------------------------------------------------------- the tile

// Whether this is the last block of `num_blocks` that takes a ticket.
__device__ inline bool takes_last_ticket(uint32_t* ticket, uint32_t num_blocks) {
  return num_blocks <= 1 || atomicInc(ticket, num_blocks - 1) == num_blocks - 1;
}

__device__ inline uint32_t num_tiles_of(const Launch& launch, const Row& row) {
  const int64_t length = launch.tile_length;
  return row.numel <= length ? 1u : static_cast<uint32_t>((row.numel + length - 1) / length);
}

// The sum over the block, always in the same order.
__device__ inline double sum_over_block(double value, double* of_warps) {
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_down_sync(~0u, value, lanes);
  }
  __syncthreads();
  if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = value;
  __syncthreads();
  double total = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
  return total;
}

struct Ending {
  double of_warps[kWarps];
  bool is_last;
};

// Whether this is the last block to come here; then it sees what the others have written.
__device__ inline bool is_last_here(uint32_t* ticket, uint32_t num_blocks, Ending* ending) {
  if (threadIdx.x == 0) {
    __threadfence();
    ending->is_last = takes_last_ticket(ticket, num_blocks);
    __threadfence();
  }
  __syncthreads();
  return ending->is_last;
}

// Adds a tile's sums to its tensor's, and when all tensors have theirs, to the total.
template <int kSums>
__device__ void add_up(const Launch& launch, const Row& row, uint32_t number, double* sums,
                       Ending* ending) {
  const uint32_t num_tiles = num_tiles_of(launch, row);
  for (int k = 0; k < kSums; ++k) sums[k] = sum_over_block(sums[k], ending->of_warps);
  if (num_tiles > 1) {
    double* partial = launch.partial_sums + static_cast<int64_t>(blockIdx.x) * kMaxSums;
    for (int k = 0; k < kSums && threadIdx.x == 0; ++k) partial[k] = sums[k];
    if (!is_last_here(&launch.tickets[number], num_tiles, ending)) return;
    const double* all = launch.partial_sums + static_cast<int64_t>(row.first_tile) * kMaxSums;
    for (int k = 0; k < kSums; ++k) {
      double sum = 0.0;
      for (uint32_t i = threadIdx.x; i < num_tiles; i += kThreads) {
        sum += __ldcg(&all[static_cast<int64_t>(i) * kMaxSums + k]);
      }
      sums[k] = sum_over_block(sum, ending->of_warps);
    }
  }
  for (int k = 0; k < kSums && threadIdx.x == 0; ++k) {
    launch.sums[row.index * kMaxSums + k] = sums[k];
  }
  if (launch.total == nullptr) return;
  if (!is_last_here(&launch.tickets[launch.num_rows], launch.num_rows, ending)) return;
  double sum = 0.0;
  for (uint32_t i = threadIdx.x; i < launch.num_rows; i += kThreads) {
    sum += __ldcg(&launch.sums[launch.rows[i].index * kMaxSums]);
  }
  sum = sum_over_block(sum, ending->of_warps);
  if (threadIdx.x == 0) {
    if (launch.adds_to_total) sum += *launch.total;
    *launch.total = sum;
    *launch.total_is_bad = isfinite(sum) ? 0.0f : 1.0f;
  }
}

// Of one multiprocessor: as many as have registers enough to spill none, which would cost more.
constexpr int num_blocks(Kind kind) {
  if (kind == Kind::Float64) return 3;
  return kind == Kind::Float32 ? 7 : 6;
}

template <Kind kKind, template <class> class Update>
__global__ void __launch_bounds__(kThreads, num_blocks(kKind))
    update_kernel(const __grid_constant__ Launch launch) {
  using T = std::conditional_t<kKind == Kind::Float64, double, float>;
  constexpr int kSums = Update<T>::kNumSums;
  __shared__ Shared<T, Update<T>> shared;
  __shared__ Ending ending;
  const uint32_t number = launch.row_of_tiles[blockIdx.x];
  const void* grad = launch.grads[number];
  if (threadIdx.x < sizeof(Row) / sizeof(uint32_t)) {
    reinterpret_cast<uint32_t*>(&shared.row)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&launch.rows[number])[threadIdx.x];
  }
  __syncthreads();
  const Row& row = shared.row;
  double sums[kSums + 1] = {};
  if (grad == nullptr) {
    if constexpr (kSums > 0) add_up<kSums>(launch, row, number, sums, &ending);
    return;
  }
  // Its strides lie apart, so that blocks which run at the same time are at neighbouring ones: that
  // is what memory is fast at.
  const int64_t apart = kStride * num_tiles_of(launch, row);
  const int64_t begin = kStride * (blockIdx.x - row.first_tile);
  const bool is_vector = row.is_vector && reinterpret_cast<uintptr_t>(grad) % 16 == 0;
  int64_t first = begin + threadIdx.x * kPerThread;
  const int64_t end_of_vectors = is_vector ? row.numel - kPerThread : -1;
  Loaded<kKind, T, Update<T>> loaded;
  if (first <= end_of_vectors) loaded.load_all(row, grad, first);
  if (threadIdx.x == 0) prepare(launch, &shared);
  __syncthreads();
  if (shared.skips) return;
  bool counts_step = false;
  if (kSums == 0 && launch.is_last_pass && threadIdx.x == 0) {
    // Every block has read step and scalar before it takes its ticket: they are in `shared`.
    counts_step = takes_last_ticket(&launch.tickets[number], num_tiles_of(launch, row));
  }
  if (is_vector) {
    for (int64_t at = begin;;) {
      if (first <= end_of_vectors)
        update_all<kKind>(launch, shared, first, take(row, loaded), sums);
      at += apart;
      if (at > end_of_vectors) break;
      first += apart;
      if (first <= end_of_vectors) loaded.load_all(row, grad, first);
      __syncthreads();  // keeps the warps near each other, for the same reason
    }
    if (first <= end_of_vectors) first += apart;
  }
  // What is left: the end of the tensor, or all that cannot be loaded as vectors.
  for (; first < row.numel; first += apart) {
    const int64_t last = min(row.numel, first + kPerThread);
    const auto more = update_slowly<T, Update<T>>(launch, shared, grad, first, last);
    for (int k = 0; k < kSums; ++k) sums[k] += more.values[k];
  }
  if constexpr (kSums > 0) add_up<kSums>(launch, row, number, sums, &ending);
  if (counts_step) {
    const Job job = job_of<Update<T>>(launch, row);
    if constexpr ((Update<T>::kAccess & kWritesScalar) != 0) {
      *row.scalar = static_cast<float>(Update<T>::next_scalar(job));
    }
    if (row.step != nullptr) *row.step = static_cast<float>(job.step);
  }
}

// --------------------------------------------------------------------------------------- launching

inline Status from_cuda(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {Code::Internal, std::string(what) + ": " + cudaGetErrorString(error)};
}

template <template <class> class Update>
Status launch(const Launch& launch, void* stream) {
  if (launch.num_rows == 0) return {};
  constexpr decltype(&update_kernel<Kind::Mixed, Update>) kKernels[kNumKinds] = {
      update_kernel<Kind::Float32, Update>, update_kernel<Kind::Mixed, Update>,
      update_kernel<Kind::Float64, Update>};
  const auto kernel = kKernels[static_cast<int>(launch.kind)];
  kernel<<<launch.num_tiles, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
  return from_cuda("an optimizer's kernel", cudaGetLastError());
}

}  // namespace gpumode::optim
