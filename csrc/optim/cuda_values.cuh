#pragma once

#include "optim/cuda_pass.h"
#include "optim/update.h"

// How values come from memory and go back: as vectors of kPerThread values, whose loads are all
// issued before the first is looked at; or one by one, in any dtype, alignment and layout.
namespace gpumode::optim {

// A row's operands, in the order of Row::layout.
constexpr int kParamOperand = 0, kGradOperand = 1, kMasterOperand = 2, kStateOperand = 3;

__device__ inline bool is_half(DType dtype) {
  return dtype != DType::F32;
}  // in a vector of floats

// ----------------------------------------------------------------------------- vectors, T = float

// Of floats, or of halves, two in each of the first words.
struct FloatVector {
  uint32_t words[kPerThread];

  __device__ uint16_t half(int i) const {
    return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
};

__device__ inline FloatVector pack(const uint16_t (&halves)[kPerThread]) {
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

__device__ inline void widen(const FloatVector& from, DType dtype, float (&values)[kPerThread]) {
  if (dtype == DType::F32) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = float_of(from.words[i]);
  } else if (dtype == DType::BF16) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = BF16::widen(from.half(i));
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = F16::widen(from.half(i));
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

__device__ inline FloatVector narrow(DType dtype, const float (&values)[kPerThread],
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
  uint16_t halves[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) halves[i] = narrow(dtype, values[i], rounding, first + i);
  return pack(halves);
}

// ---------------------------------------------------------------------------- vectors, T = double

struct DoubleVector {
  double values[kPerThread];
};

__device__ inline void load(DoubleVector* to, const void* data, DType /*dtype*/, int64_t first) {
  const auto* two = reinterpret_cast<const double2*>(static_cast<const double*>(data) + first);
  const double2 low = two[0], high = two[1];
  *to = {{low.x, low.y, high.x, high.y}};
}

__device__ inline void store(void* data, DType /*dtype*/, int64_t first, const DoubleVector& from) {
  auto* two = reinterpret_cast<double2*>(static_cast<double*>(data) + first);
  two[0] = make_double2(from.values[0], from.values[1]);
  two[1] = make_double2(from.values[2], from.values[3]);
}

__device__ inline void widen(const DoubleVector& from, DType /*dtype*/,
                             double (&values)[kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) values[i] = from.values[i];
}

__device__ inline DoubleVector narrow(DType /*dtype*/, const double (&values)[kPerThread],
                                      const Rounding& /*rounding*/, int64_t /*first*/) {
  return {{values[0], values[1], values[2], values[3]}};
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

// --------------------------------------------------------------------------------------- one by
// one

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

}  // namespace gpumode::optim
