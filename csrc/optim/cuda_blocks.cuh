#pragma once

#include "optim/blocks.h"
#include "optim/cuda_pipeline.cuh"
#include "optim/cuda_values.cuh"

// States in blocks. A warp has one block at a time, and each of its threads a vector of elements,
// whose codes are the bytes of one word.
namespace gpumode::optim {

static_assert(kBlock == kLanes * kFloats);

template <class Format>
__device__ void widen(uint32_t codes, uint32_t exponent, float (&values)[kFloats]) {
  const float scale = Format::Magnitude::scale(exponent);
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    values[i] = Format::widen(static_cast<uint8_t>(codes >> 8 * i), scale);
  }
}

// Called by all of a warp. `random` is below 2^16.
template <class Format>
__device__ uint32_t narrow(const float (&values)[kFloats], const uint32_t (&random)[kFloats],
                           uint32_t* exponent) {
  uint32_t largest = 0, codes = 0;
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    largest = max(largest, bits_of(values[i]) & 0x7fffffffu);
  }
  using Magnitude = typename Format::Magnitude;
  *exponent = Magnitude::exponent(__reduce_max_sync(~0u, largest));
  const float inverse_scale = Magnitude::inverse_scale(*exponent);
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    codes |= Format::narrow(values[i], inverse_scale, random[i]) << 8 * i;
  }
  return *exponent == Magnitude::kNotFinite ? 0 : codes;
}

__device__ inline void widen(bool is_squares, uint32_t codes, uint32_t exponent,
                             float (&values)[kFloats]) {
  is_squares ? widen<Square8>(codes, exponent, values) : widen<Signed8>(codes, exponent, values);
}

__device__ inline uint32_t narrow(bool is_squares, const float (&values)[kFloats],
                                  const uint32_t (&random)[kFloats], uint32_t* exponent) {
  return is_squares ? narrow<Square8>(values, random, exponent)
                    : narrow<Signed8>(values, random, exponent);
}

// The exponent of the block that element `index` is in.
__device__ inline uint8_t* exponent_at(void* state, int64_t numel, int64_t index) {
  return static_cast<uint8_t*>(state) + block_exponents_offset(numel) + index / kBlock;
}

__device__ inline bool has_blocks(const Row& row) {
  bool has = false;
#pragma unroll
  for (const DType dtype : row.state_dtypes) has = has || dtype == DType::U8;
  return has;
}

}  // namespace gpumode::optim
