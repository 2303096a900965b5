#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Arithmetic that the CPU's and CUDA's kernels share. Both give the same bits: every operation here
// is one that IEEE 754 rounds correctly, and the build lets neither compiler fuse a product with a
// sum (setup.py).
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define GPUMODE_HD __host__ __device__ __forceinline__
#else
#define GPUMODE_HD inline __attribute__((always_inline))
#endif

namespace gpumode::optim {

GPUMODE_HD uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

GPUMODE_HD float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
}

// Written out, since compilers give up vectors where choices are nested.
GPUMODE_HD uint32_t select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

GPUMODE_HD bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

GPUMODE_HD float root(float x) { return sqrtf(x); }
GPUMODE_HD double root(double x) { return sqrt(x); }

template <class T>
GPUMODE_HD T sign(T x) {
  const T up = x > T(0) ? T(1) : T(0);
  const T down = x < T(0) ? T(1) : T(0);
  return x != x ? x : up - down;
}

// base^exponent by squaring. Two systems' pow differ in the last bit; products do not.
GPUMODE_HD double power(double base, double exponent) {
  double result = 1.0;
  for (auto n = static_cast<uint64_t>(exponent); n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

// ------------------------------------------------------------------------------------ half formats

// How values of a type lie in memory. `random` chooses between the two neighbours of a value that
// lies between them, where it is rounded stochastically.
struct F32 {
  using Raw = float;
  static GPUMODE_HD float widen(Raw raw) { return raw; }
  static GPUMODE_HD Raw narrow(float x) { return x; }
};

struct F64 {
  using Raw = double;
  static GPUMODE_HD double widen(Raw raw) { return raw; }
  static GPUMODE_HD Raw narrow(double x) { return x; }
};

struct BF16 {
  using Raw = uint16_t;
  static GPUMODE_HD float widen(Raw raw) { return float_of(static_cast<uint32_t>(raw) << 16); }
  static GPUMODE_HD Raw narrow(float x) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#endif
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<Raw>(is_nan_bits(u) ? (u >> 16) | 0x40u : rounded);
  }
  // Away from zero with the probability of what truncation would cut off.
  static GPUMODE_HD Raw narrow(float x, uint32_t random) {
    const uint32_t u = bits_of(x);
    const bool is_finite = (u & 0x7f800000u) != 0x7f800000u;
    return is_finite ? static_cast<Raw>((u + (random & 0xffffu)) >> 16) : narrow(x);
  }
};

struct F16 {
  using Raw = uint16_t;
  static GPUMODE_HD float widen(Raw raw) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(raw));
#endif
    const uint32_t h = raw;
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + 0x38000000u;  // the exponent's bias: 127 - 15
    // In the binade of 0.5f the smallest subnormal is one ulp.
    const uint32_t subnormal = bits_of(float_of(magnitude | 0x3f000000u) - 0.5f);
    uint32_t u = select(magnitude > 0x3ffu, normal, subnormal);
    u |= select(magnitude > 0x7bffu, 0x7f800000u, 0u);  // infinity and NaN
    return float_of(u | (h & 0x8000u) << 16);
  }
  static GPUMODE_HD Raw narrow(float x) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(x));
#endif
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    const uint32_t u = bits_of(x) & 0x7fffffffu;
    const uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    const uint32_t subnormal = bits_of(float_of(u) + 0.5f) - 0x3f000000u;
    uint32_t h = select(u > 0x387fffffu, normal, subnormal);
    h = select(u > 0x477fffffu, 0x7c00u, h);  // 2^16 and above
    h = select(u > 0x7f800000u, 0x7e00u, h);
    return static_cast<Raw>(h | sign);
  }
};

// A float as the bfloat16 nearest to it (ties away from zero) and what that leaves out: together
// exact, in the memory of a float.
GPUMODE_HD float join(uint16_t high, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(high) - (remainder < 0 ? 1u : 0u);
  return float_of(upper << 16 | static_cast<uint16_t>(remainder));
}

GPUMODE_HD void split(float x, uint16_t* high, int16_t* remainder) {
  const uint32_t u = is_nan_bits(bits_of(x)) ? 0x7fc00000u : bits_of(x);
  *remainder = static_cast<int16_t>(u & 0xffffu);
  *high = static_cast<uint16_t>((u + 0x8000u) >> 16);
}

// ------------------------------------------------------------------------------- random numbers

// A bijection of 32-bit words in which each bit of the result depends on all bits of `x`.
// Constants: C. Wellons, "Prospecting for Hash Functions", 2018.
GPUMODE_HD uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// What the random bits of one operand of one tensor in one step start from.
GPUMODE_HD uint32_t random_key(uint64_t seed, uint64_t step, uint32_t tensor, uint32_t operand) {
  uint32_t key = mix(static_cast<uint32_t>(seed) ^ 0x9e3779b9u);
  key = mix(key ^ static_cast<uint32_t>(seed >> 32));
  key = mix(key + static_cast<uint32_t>(step));
  key = mix(key + tensor);
  return mix(key + operand);
}

// The same for the 2^32 elements of which `index` is one.
GPUMODE_HD uint32_t random_key_at(uint32_t key, int64_t index) {
  return mix(key + static_cast<uint32_t>(index >> 32));
}

GPUMODE_HD uint32_t random_bits(uint32_t key, uint32_t index) { return mix(index ^ key); }

}  // namespace gpumode::optim
