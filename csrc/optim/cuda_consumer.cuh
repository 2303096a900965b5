#pragma once

#include <type_traits>

#include "optim/cuda_blocks.cuh"
#include "optim/cuda_stage.cuh"
#include "optim/cuda_sums.cuh"
#include "optim/cuda_values.cuh"
#include "optim/grads.h"

namespace gpumode::optim {

// What gradients are multiplied by.
__device__ inline double factor_of(const Launch& launch) {
  double factor =
      launch.grad_scale == nullptr ? 1.0 : 1.0 / static_cast<double>(*launch.grad_scale);
  if (launch.grad_sum != nullptr) {
    factor *= clip_coefficient(root(*launch.grad_sum), launch.max_norm);
  }
  return factor;
}

// An operand's dtype, known to the compiler unless the form is Any.
template <Form kForm>
__device__ DType as(DType known, DType dtype) {
  return kForm == Form::Any ? dtype : known;
}

// Updates what was loaded ahead.
template <class T, class Update, Form kForm>
__device__ __forceinline__ void update_loaded(const Launch& launch, const Stage<Update>& stage,
                                              const unsigned char* memory, T factor, double* sums) {
  constexpr FormDtypes kDtypes = kFormDtypes[static_cast<int>(kForm)];
  constexpr int kStates = Update::kNumStates, kSums = Update::kNumSums;
  constexpr int kPerThread = kVector<T>;
  constexpr unsigned kAccess = Update::kAccess;
  static_assert(kStates == 0 || (kAccess & kReadsStates) != 0);  // only then are they loaded
  constexpr bool kCanHaveBlocks = sizeof(T) == sizeof(float);
  using Vector = typename VectorOf<T>::Type;
  const Tensor<Update>& tensor = stage.tensor;
  const Row& row = tensor.row;
  const Update update = *reinterpret_cast<const Update*>(tensor.update);
  const DType param_dtype = as<kForm>(kDtypes.param, row.param_dtype);
  const DType grad_dtype = as<kForm>(kDtypes.grad, row.grad_dtype);
  const Master master_kind = kForm == Form::Any ? row.master_kind : kDtypes.master;
  const auto is_there = [&](int k) {
    if (kDtypes.state == DType::U8) return k < Update::kNumUsualStates;
    return row.states[k] != nullptr;
  };
  const auto take = [&](int operand, DType dtype, int at) {
    Vector vector;
    load(&vector, memory + tensor.offsets[operand], dtype, at);
    return vector;
  };
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * kPerThread; at < static_cast<int>(stage.num_loaded);
       at += kConsumers * kPerThread) {
    T p[kPerThread] = {}, g[kPerThread] = {}, s[kStates + 1][kPerThread] = {};
    if (kAccess & kReadsParam) {
      const Vector param = take(kParamOperand, param_dtype, at);
      bool has_master = false;
      if constexpr (sizeof(T) == sizeof(float)) {
        has_master = master_kind != Master::None;
        if (has_master) {
          const Vector master = take(kMasterOperand, row.master_dtype, at);
          widen(param, param_dtype, master, master_kind, p);
        }
      }
      if (!has_master) widen(param, param_dtype, p);
    }
    if (kAccess & kReadsGrad) widen(take(kGradOperand, grad_dtype, at), grad_dtype, g);
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (!is_there(k)) continue;
      const DType dtype = as<kForm>(kDtypes.state, row.state_dtypes[k]);
      if constexpr (kCanHaveBlocks) {
        if (dtype == DType::U8) {
          const unsigned char* codes = memory + tensor.offsets[kStateOperand + k];
          const uint32_t exponent = codes[kTileOfBlocks + at / kBlock];
          widen(Update::kSquares >> k & 1, *reinterpret_cast<const uint32_t*>(codes + at), exponent,
                s[k]);
          continue;
        }
      }
      widen(take(kStateOperand + k, dtype, at), dtype, s[k]);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      T states[kStates + 1], terms[kSums + 1];
#pragma unroll
      for (int k = 0; k < kStates; ++k) states[k] = s[k][i];
      update(p[i], g[i] * factor, states, terms);
#pragma unroll
      for (int k = 0; k < kStates; ++k) s[k][i] = states[k];
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += static_cast<double>(terms[k]);
    }
    const int64_t index = stage.first + at;
    if (kAccess & kWritesParam) {
      Rounding rounding = {launch.stochastic, tensor.keys[0]};
      bool has_remainder = false;
      if constexpr (sizeof(T) == sizeof(float)) {
        has_remainder = master_kind == Master::Remainder16;
        if (has_remainder) {
          Vector high, low;
          split(p, &high, &low);
          store(row.param, DType::BF16, index, high);
          store(row.master, DType::I16, index, low);
        }
        if (master_kind == Master::F32) {
          rounding.stochastic = false;
          store(row.master, DType::F32, index, narrow(DType::F32, p, rounding, index));
        }
      }
      if (!has_remainder) {
        store(row.param, param_dtype, index, narrow(param_dtype, p, rounding, index));
      }
    }
    if (kAccess & kWritesStates) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        if (!is_there(k)) continue;
        const DType dtype = as<kForm>(kDtypes.state, row.state_dtypes[k]);
        if constexpr (kCanHaveBlocks) {
          if (dtype == DType::U8) {
            const auto pair = static_cast<uint32_t>(index) / 2;
            const uint32_t a = random_bits(stage.keys[k], pair);
            const uint32_t b = random_bits(stage.keys[k], pair + 1);
            uint32_t exponent;
            const uint32_t codes = narrow(Update::kSquares >> k & 1, s[k],
                                          {a & 0xffffu, a >> 16, b & 0xffffu, b >> 16}, &exponent);
            *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(row.states[k]) + index) = codes;
            if (threadIdx.x % kLanes == 0) {
              stage.exponents[k][at / kBlock] = static_cast<uint8_t>(exponent);
            }
            continue;
          }
        }
        const Rounding rounding = {launch.stochastic, tensor.keys[1 + k]};
        store(row.states[k], dtype, index, narrow(dtype, s[k], rounding, index));
      }
    }
  }
}

// Updates all of a stage, with the loop of its form.
template <class T, class Update>
__device__ void update_stage(const Launch& launch, const Stage<Update>& stage,
                             const unsigned char* memory, T factor, double* sums) {
  if constexpr (sizeof(T) == sizeof(double)) {
    update_loaded<T, Update, Form::Any>(launch, stage, memory, factor, sums);
  } else {
    switch (stage.tensor.row.form) {
#define GPUMODE_CASE(form)                                                     \
  case Form::form:                                                             \
    update_loaded<T, Update, Form::form>(launch, stage, memory, factor, sums); \
    break;
      GPUMODE_CASE(Any)
      GPUMODE_CASE(Float32)
      GPUMODE_CASE(BFloat16)
      GPUMODE_CASE(BFloat16States32)
      GPUMODE_CASE(BFloat16Master32)
      GPUMODE_CASE(BFloat16Remainder16)
      GPUMODE_CASE(Float32States8)
      GPUMODE_CASE(BFloat16States8)
      GPUMODE_CASE(BFloat16Master32States8)
      GPUMODE_CASE(BFloat16Remainder16States8)
#undef GPUMODE_CASE
    }
  }
  // The end of the tensor, or all that cannot be loaded as vectors.
  if (stage.num_loaded == stage.length) return;
  const auto more = update_slowly<T, Update>(
      stage.tensor.row, *reinterpret_cast<const Update*>(stage.tensor.update), stage.tensor.grad,
      factor, launch.stochastic, stage.tensor.keys,
      stage.first + stage.num_loaded + threadIdx.x / kLanes * kBlock, stage.first + stage.length,
      kConsumerWarps * kBlock);
  for (int k = 0; k < Update::kNumSums; ++k) sums[k] += more.values[k];
}

template <class T, class Update, class Sums>
__device__ void consume(const Launch& launch, Shared<Update>* shared, Sums* sums,
                        const unsigned char* memory, uint32_t num_stages) {
  const auto factor = static_cast<T>(factor_of(launch));
  constexpr bool kHasSums = Update::kNumSums > 0;
  std::conditional_t<kHasSums, Adder<Update>, NoAdder> adder(launch, sums);
  for (Turn turn;; turn.next(num_stages)) {
    shared->full[turn.stage].wait(turn.phase);
    const Stage<Update>& stage = shared->stages[turn.stage];
    if (stage.is_end) break;
    if constexpr (kHasSums) adder.begin(stage);
    const unsigned char* loaded = memory + turn.stage * launch.stage_bytes;
    if (stage.tensor.grad != nullptr) update_stage(launch, stage, loaded, factor, adder.values);
    __syncwarp();
    if (threadIdx.x % kLanes == 0) shared->empty[turn.stage].arrive();
  }
  if constexpr (kHasSums) adder.end();
}

}  // namespace gpumode::optim
