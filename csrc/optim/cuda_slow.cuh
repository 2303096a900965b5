#pragma once

#include "optim/cuda_blocks.cuh"
#include "optim/cuda_pass.h"
#include "optim/cuda_values.cuh"

// One element at a time, in any dtype, alignment and layout.
namespace gpumode::optim {

// A row's operands, in the order of Row::layout.
constexpr int kParamOperand = 0, kGradOperand = 1, kMasterOperand = 2, kStateOperand = 3;
constexpr int kMaxOperands = kStateOperand + kMaxStates;

// Where element `index` of an operand is.
__device__ inline int64_t offset_of(const int64_t* layout, int operand, int64_t index) {
  if (layout == nullptr) return index;
  const auto num_dims = static_cast<int>(layout[0]);
  const int64_t* sizes = layout + 1;
  const int64_t* strides = sizes + num_dims * (1 + operand);
  int64_t offset = 0;
#pragma unroll 1
  for (int d = num_dims - 1; d > 0; --d) {
    offset += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return offset + index * strides[0];
}

template <class T>
__device__ T load_one(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::F32) return static_cast<T>(static_cast<const float*>(data)[at]);
  if (dtype == DType::F64) return static_cast<T>(static_cast<const double*>(data)[at]);
  const uint16_t half = static_cast<const uint16_t*>(data)[at];
  return static_cast<T>(dtype == DType::BF16 ? BF16::widen(half) : F16::widen(half));
}

template <class T>
__device__ void store_one(void* data, DType dtype, int64_t at, T value, const Rounding& rounding,
                          int64_t index) {
  if (dtype == DType::F32) {
    static_cast<float*>(data)[at] = static_cast<float>(value);
  } else if (dtype == DType::F64) {
    static_cast<double*>(data)[at] = static_cast<double>(value);
  } else {
    static_cast<uint16_t*>(data)[at] = narrow(dtype, static_cast<float>(value), rounding, index);
  }
}

template <class T>
__device__ T load_param(const Row& row, int64_t at, int64_t master_at) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (row.master_kind != Master::None) {
      const uint16_t half = static_cast<const uint16_t*>(row.param)[at];
      if (row.master_kind == Master::Remainder16) {
        return join(half, static_cast<const int16_t*>(row.master)[master_at]);
      }
      return exact(row.param_dtype, half, static_cast<const float*>(row.master)[master_at]);
    }
  }
  return load_one<T>(row.param, row.param_dtype, at);
}

template <class T>
__device__ void store_param(const Row& row, int64_t at, int64_t master_at, int64_t index, T value,
                            Rounding rounding) {
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

// What a warp has of a state in blocks: one value of each lane, and then the next.
__device__ inline float load_one_of_block(void* state, bool is_squares, int64_t numel,
                                          int64_t index) {
  float values[kFloats];
  widen(is_squares, static_cast<const uint8_t*>(state)[index], *exponent_at(state, numel, index),
        values);
  return values[0];
}

__device__ inline void store_block(void* state, bool is_squares, int64_t numel, int64_t first,
                                   const float (&values)[kFloats], uint32_t key) {
  key = random_key_at(key, first);
  const int64_t mine = first + threadIdx.x % kLanes;
  uint32_t random[kFloats], exponent;
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    const auto index = static_cast<uint32_t>(mine + i * kLanes);
    random[i] = random_bits(key, index / 2) >> index % 2 * 16 & 0xffffu;
  }
  const uint32_t codes = narrow(is_squares, values, random, &exponent);
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    const int64_t index = mine + i * kLanes;
    if (index < numel) static_cast<uint8_t*>(state)[index] = static_cast<uint8_t>(codes >> 8 * i);
  }
  if (threadIdx.x % kLanes == 0) {
    *exponent_at(state, numel, first) = static_cast<uint8_t>(exponent);
  }
}

template <class Update>
struct Sums {
  double values[Update::kNumSums + 1];
};

// Updates kBlock elements from `first`, from `first + stride`, ... below `last`, by a warp. Not
// inlined, so that it costs those who load vectors no registers. `keys` are of random bits: for the
// parameter, and the states.
template <class T, class Update>
__device__ __noinline__ Sums<Update> update_slowly(const Row& row, const Update& update,
                                                   const void* grad, T factor, bool stochastic,
                                                   const uint32_t* keys, int64_t first,
                                                   int64_t last, int64_t stride) {
  constexpr int kStates = Update::kNumStates;
  constexpr unsigned kAccess = Update::kAccess;
  const auto is_in_blocks = [&](int k) {
    return sizeof(T) == sizeof(float) && row.states[k] != nullptr &&
           row.state_dtypes[k] == DType::U8;
  };
  Sums<Update> sums{};
  float of_blocks[kStates + 1][kFloats];
  const auto update_one = [&](int64_t index, int i) {
    const auto at = [&](int operand) { return offset_of(row.layout, operand, index); };
    const int64_t param_at = at(kParamOperand);
    const int64_t master_at = row.master == nullptr ? 0 : at(kMasterOperand);
    T p{}, g{}, states[kStates + 1], terms[Update::kNumSums + 1];
    if (kAccess & kReadsParam) p = load_param<T>(row, param_at, master_at);
    if (kAccess & kReadsGrad) g = load_one<T>(grad, row.grad_dtype, at(kGradOperand));
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      states[k] = T(0);
      if (row.states[k] == nullptr) continue;
      if (is_in_blocks(k)) {
        states[k] = static_cast<T>(
            load_one_of_block(row.states[k], Update::kSquares >> k & 1, row.numel, index));
        continue;
      }
      states[k] = load_one<T>(row.states[k], row.state_dtypes[k], at(kStateOperand + k));
    }
    update(p, g * factor, states, terms);
#pragma unroll
    for (int k = 0; k < Update::kNumSums; ++k) sums.values[k] += static_cast<double>(terms[k]);
    if (kAccess & kWritesParam) {
      store_param(row, param_at, master_at, index, p, {stochastic, keys[0]});
    }
#pragma unroll
    for (int k = 0; k < kStates && kAccess & kWritesStates; ++k) {
      if (row.states[k] == nullptr) continue;
      if (is_in_blocks(k)) {
        of_blocks[k][i] = static_cast<float>(states[k]);
        continue;
      }
      store_one(row.states[k], row.state_dtypes[k], at(kStateOperand + k), states[k],
                {stochastic, keys[1 + k]}, index);
    }
  };
#pragma unroll 1
  for (; first < last; first += stride) {
    for (auto& values : of_blocks) {
      for (float& value : values) value = 0.0f;
    }
    const int64_t mine = first + threadIdx.x % kLanes;
#pragma unroll 1
    for (int i = 0; i < kFloats && mine + i * kLanes < last; ++i) {
      update_one(mine + i * kLanes, i);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kStates && kAccess & kWritesStates; ++k) {
      if (!is_in_blocks(k)) continue;
      store_block(row.states[k], Update::kSquares >> k & 1, row.numel, first, of_blocks[k],
                  keys[1 + k]);
    }
  }
  return sums;
}

}  // namespace gpumode::optim
