#pragma once

#include "optim/cuda_pass.h"
#include "optim/update.h"

// How values come from memory and go back, as vectors of as many values as have 16 bytes in T.
namespace gpumode::optim {

template <class T>
constexpr int kVector = 16 / sizeof(T);
constexpr int kFloats = kVector<float>, kDoubles = kVector<double>;

__host__ __device__ constexpr uint32_t size_of(DType dtype) {
  if (dtype == DType::F64) return 8;
  if (dtype == DType::U8) return 1;
  return dtype == DType::F32 ? 4 : 2;
}

__device__ inline bool is_half(DType dtype) {
  return dtype != DType::F32;
}  // in a vector of floats

// ----------------------------------------------------------------------------- vectors, T = float

// Of floats, or of halves, two in each of the first words.
struct FloatVector {
  uint32_t words[kFloats];

  __device__ uint16_t half(int i) const {
    return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
};

__device__ inline FloatVector pack(const uint16_t (&halves)[kFloats]) {
  const auto pair = [&](int i) { return halves[i] | static_cast<uint32_t>(halves[i + 1]) << 16; };
  return {{pair(0), pair(2)}};
}

__device__ inline void load(FloatVector* to, const void* data, DType dtype, int64_t first) {
  if (is_half(dtype)) {
    const auto two = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + first);
    *to = {{two.x, two.y}};
  } else {
    const auto four = *reinterpret_cast<const uint4*>(static_cast<const float*>(data) + first);
    *to = {{four.x, four.y, four.z, four.w}};
  }
}

__device__ inline void store(void* data, DType dtype, int64_t first, const FloatVector& from) {
  const uint32_t* w = from.words;
  if (is_half(dtype)) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + first) = make_uint2(w[0], w[1]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<float*>(data) + first) =
        make_uint4(w[0], w[1], w[2], w[3]);
  }
}

__device__ inline void widen(const FloatVector& from, DType dtype, float (&values)[kFloats]) {
  if (dtype == DType::F32) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) values[i] = float_of(from.words[i]);
  } else if (dtype == DType::BF16) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) values[i] = BF16::widen(from.half(i));
  } else {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) values[i] = F16::widen(from.half(i));
  }
}

// The exact value of a parameter in half precision. Where it is not what was rounded from its
// master, somebody has written it since.
__device__ inline float exact(DType dtype, uint16_t half, float master) {
  const bool is_bf16 = dtype == DType::BF16;
  if (half == (is_bf16 ? BF16::narrow(master) : F16::narrow(master))) return master;
  return is_bf16 ? BF16::widen(half) : F16::widen(half);
}

__device__ inline void widen(const FloatVector& param, DType dtype, const FloatVector& master,
                             Master kind, float (&values)[kFloats]) {
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    values[i] = kind == Master::F32 ? exact(dtype, param.half(i), float_of(master.words[i]))
                                    : join(param.half(i), static_cast<int16_t>(master.half(i)));
  }
}

// How a value is rounded on its way to memory.
struct Rounding {
  bool stochastic;
  uint32_t key;  // of random bits, if it is
};

__device__ inline uint16_t narrow(DType dtype, float value, const Rounding& rounding,
                                  int64_t index) {
  if (dtype == DType::F16) return F16::narrow(value);
  if (!rounding.stochastic) return BF16::narrow(value);
  const uint32_t key = random_key_at(rounding.key, index);
  return BF16::narrow(value, random_bits(key, static_cast<uint32_t>(index)));
}

__device__ inline FloatVector narrow(DType dtype, const float (&values)[kFloats],
                                     const Rounding& rounding, int64_t first) {
  if (dtype == DType::F32) {
    return {{bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3])}};
  }
  if (dtype == DType::BF16 && !rounding.stochastic) {
    const auto pair = [&](int i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(values[i], values[i + 1]);
      uint32_t word;
      memcpy(&word, &two, sizeof(word));
      return word;
    };
    return {{pair(0), pair(2)}};
  }
  uint16_t halves[kFloats];
#pragma unroll
  for (int i = 0; i < kFloats; ++i) halves[i] = narrow(dtype, values[i], rounding, first + i);
  return pack(halves);
}

// A parameter in bfloat16 and what that leaves out.
__device__ inline void split(const float (&values)[kFloats], FloatVector* param,
                             FloatVector* remainder) {
  uint16_t high[kFloats], low[kFloats];
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    int16_t rest;
    split(values[i], &high[i], &rest);
    low[i] = static_cast<uint16_t>(rest);
  }
  *param = pack(high);
  *remainder = pack(low);
}

// ---------------------------------------------------------------------------- vectors, T = double

struct DoubleVector {
  double values[kDoubles];
};

__device__ inline void load(DoubleVector* to, const void* data, DType /*dtype*/, int64_t first) {
  const auto two = *reinterpret_cast<const double2*>(static_cast<const double*>(data) + first);
  *to = {{two.x, two.y}};
}

__device__ inline void store(void* data, DType /*dtype*/, int64_t first, const DoubleVector& from) {
  *reinterpret_cast<double2*>(static_cast<double*>(data) + first) =
      make_double2(from.values[0], from.values[1]);
}

__device__ inline void widen(const DoubleVector& from, DType /*dtype*/,
                             double (&values)[kDoubles]) {
#pragma unroll
  for (int i = 0; i < kDoubles; ++i) values[i] = from.values[i];
}

__device__ inline DoubleVector narrow(DType /*dtype*/, const double (&values)[kDoubles],
                                      const Rounding& /*rounding*/, int64_t /*first*/) {
  return {{values[0], values[1]}};
}

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = FloatVector;
};
template <>
struct VectorOf<double> {
  using Type = DoubleVector;
};

}  // namespace gpumode::optim
