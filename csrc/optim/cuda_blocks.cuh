#pragma once

#include <cuda_fp8.h>

#include "optim/blocks.h"
#include "optim/cuda_pipeline.cuh"
#include "optim/cuda_values.cuh"

// States in blocks. A warp has one block at a time, and each of its threads a vector of elements,
// whose codes are the bytes of one word. The same numbers as by the formats of blocks.h, in fewer
// instructions, of which a step is made of many: subnormal floats, which cost nothing here, are
// what codes are but for their scale.
namespace gpumode::optim {

static_assert(kBlock == kLanes * kFloats);

// 2^exponent.
__device__ constexpr float power_of_two(int exponent) {
  return exponent < 0 ? 0.5f * power_of_two(exponent + 1)
                      : (exponent > 0 ? 2.0f * power_of_two(exponent - 1) : 1.0f);
}

// From the smallest normal float to that of codes.
template <class Magnitude>
constexpr int kOfSubnormals = static_cast<int>(Magnitude::kSmallestNormal) - 1;

__device__ inline void widen(Signed8 /*format*/, uint32_t codes, uint32_t exponent,
                             float (&values)[kFloats]) {
  const float scale = Signed8::Magnitude::scale(exponent) * power_of_two(-8);  // 256 is 1 there
#pragma unroll
  for (int i = 0; i < kFloats; i += 2) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(codes >> 8 * i);
    const float2 both = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    values[i] = both.x * scale;
    values[i + 1] = both.y * scale;
  }
}

__device__ inline void widen(Square8 /*format*/, uint32_t codes, uint32_t exponent,
                             float (&values)[kFloats]) {
  using Magnitude = Square8::Magnitude;
  const float scale = Magnitude::scale(exponent);
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t code = codes >> 8 * i & 0xffu;
    values[i] =
        float_of(code << Magnitude::kShift) * power_of_two(kOfSubnormals<Magnitude>) * scale;
  }
}

// Or NaN, if any is.
__device__ inline float max_magnitude(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(a)), "f"(fabsf(b)));
  return most;
}

// Called by all of a warp. `random` is below 2^16.
template <class Format>
__device__ uint32_t narrow(const float (&values)[kFloats], const uint32_t (&random)[kFloats],
                           uint32_t* exponent) {
  using Magnitude = typename Format::Magnitude;
  static_assert(kFloats == 4);
  const float largest =
      max_magnitude(max_magnitude(values[0], values[1]), max_magnitude(values[2], values[3]));
  *exponent = Magnitude::exponent(__reduce_max_sync(~0u, bits_of(largest) & 0x7fffffffu));
  const float inverse_scale = Magnitude::inverse_scale(*exponent);
  uint32_t at_top[kFloats];  // the code is the uppermost byte
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    const float x = fabsf(values[i]) * inverse_scale * power_of_two(-kOfSubnormals<Magnitude>);
    const uint32_t u = (bits_of(x) + (random[i] << (Magnitude::kShift - 16)))
                       << (24 - Magnitude::kShift);
    at_top[i] =
        std::is_same_v<Format, Square8> ? max(u, 1u << 24) : u | (bits_of(values[i]) & 0x80000000u);
  }
  constexpr uint32_t kTops = 0x73, kHalves = 0x5410;
  const uint32_t codes = __byte_perm(__byte_perm(at_top[0], at_top[1], kTops),
                                     __byte_perm(at_top[2], at_top[3], kTops), kHalves);
  return *exponent == Magnitude::kNotFinite ? 0 : codes;
}

__device__ inline void widen(bool is_squares, uint32_t codes, uint32_t exponent,
                             float (&values)[kFloats]) {
  is_squares ? widen(Square8{}, codes, exponent, values)
             : widen(Signed8{}, codes, exponent, values);
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
