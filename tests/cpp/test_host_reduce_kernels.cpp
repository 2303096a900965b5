#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "host/reduce_kernels.h"

namespace gpumode::host {
namespace {

// The compiler's own half type, as the reference for conversions written by hand.
using Half = _Float16;

float from_bf16(uint16_t raw) {
  const uint32_t u = uint32_t{raw} << 16;
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
}

template <class T>
std::vector<T> run(ReduceOp op, DType dtype, std::vector<std::vector<T>> sources,
                   double factor = 1.0, bool in_place = false) {
  std::vector<const std::byte*> pointers;
  for (const auto& s : sources) pointers.push_back(reinterpret_cast<const std::byte*>(s.data()));
  const size_t n = sources[0].size();
  std::vector<T> out(n), also(n);
  if (n > 0) std::memset(static_cast<void*>(out.data()), 0xff, n * sizeof(T));
  std::vector<T>& dst = in_place ? sources[1] : out;
  reduce({op, dtype, factor}, pointers.data(), static_cast<int>(sources.size()), n * sizeof(T),
         reinterpret_cast<std::byte*>(dst.data()), reinterpret_cast<std::byte*>(also.data()));
  EXPECT_TRUE(n == 0 || std::memcmp(dst.data(), also.data(), n * sizeof(T)) == 0);
  return dst;
}

template <class T>
std::vector<std::vector<T>> random_sources(int num_sources, size_t n, double low, double high) {
  std::mt19937 generator(static_cast<unsigned>(n * 31 + static_cast<size_t>(num_sources)));
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<std::vector<T>> sources(static_cast<size_t>(num_sources), std::vector<T>(n));
  for (auto& s : sources) {
    for (auto& x : s) x = static_cast<T>(uniform(generator));
  }
  return sources;
}

double apply(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::Product:
      return a * b;
    case ReduceOp::Min:
      return std::min(a, b);
    case ReduceOp::Max:
      return std::max(a, b);
    default:
      return a + b;
  }
}

template <class T>
void check_real(DType dtype, double tolerance) {
  for (const int num_sources : {1, 2, 3, 8}) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{15}, size_t{130}, size_t{2500}}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min,
                                ReduceOp::Max, ReduceOp::PreMulSum}) {
        if (op == ReduceOp::PreMulSum && !std::is_floating_point_v<T>) continue;
        const auto sources = random_sources<T>(num_sources, n, std::is_unsigned_v<T> ? 0 : -3, 3);
        const double factor = 0.25;  // exact in every format
        for (const bool in_place : {false, num_sources > 1}) {
          const auto out = run<T>(op, dtype, sources, factor, in_place);
          for (size_t i = 0; i < n; ++i) {
            const double scale = op == ReduceOp::PreMulSum ? factor : 1.0;
            double expected = scale * static_cast<double>(sources[0][i]);
            for (int s = 1; s < num_sources; ++s) {
              expected = apply(op, expected, scale * static_cast<double>(sources[s][i]));
            }
            if (op == ReduceOp::Avg) expected /= num_sources;
            if (std::is_integral_v<T>)
              expected = static_cast<T>(static_cast<int64_t>(expected));  // wraps
            ASSERT_NEAR(static_cast<double>(out[i]), expected,
                        tolerance * std::max(1.0, std::abs(expected)))
                << name(op) << " of " << num_sources << " at " << i << " of " << n;
          }
        }
      }
    }
  }
}

TEST(HostReduce, Float32) { check_real<float>(DType::F32, 1e-6); }
TEST(HostReduce, Float64) { check_real<double>(DType::F64, 1e-15); }
TEST(HostReduce, Int8) { check_real<int8_t>(DType::I8, 0); }
TEST(HostReduce, Int16) { check_real<int16_t>(DType::I16, 0); }
TEST(HostReduce, Int32) { check_real<int32_t>(DType::I32, 0); }
TEST(HostReduce, Int64) { check_real<int64_t>(DType::I64, 0); }

TEST(HostReduce, Uint16) { check_real<uint16_t>(DType::U16, 0); }
TEST(HostReduce, Uint32) { check_real<uint32_t>(DType::U32, 0); }
TEST(HostReduce, Uint64) { check_real<uint64_t>(DType::U64, 0); }

TEST(HostReduce, IntegersWrap) {
  const int32_t big = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(run<int32_t>(ReduceOp::Sum, DType::I32, {{big}, {1}})[0],
            std::numeric_limits<int32_t>::min());
  EXPECT_EQ(run<int16_t>(ReduceOp::Product, DType::I16, {{-32768}, {-1}})[0], -32768);
  EXPECT_EQ(run<uint8_t>(ReduceOp::Sum, DType::U8, {{200}, {100}, {3}})[0], 47);
}

TEST(HostReduce, BitwiseOps) {
  const std::vector<std::vector<uint8_t>> x = {{0xf0}, {0x3c}, {0xaa}};
  EXPECT_EQ(run(ReduceOp::BAnd, DType::U8, x)[0], 0xf0 & 0x3c & 0xaa);
  EXPECT_EQ(run(ReduceOp::BOr, DType::U8, x)[0], 0xf0 | 0x3c | 0xaa);
  EXPECT_EQ(run(ReduceOp::BXor, DType::U8, x)[0], 0xf0 ^ 0x3c ^ 0xaa);
}

TEST(HostReduce, Bools) {
  const std::vector<std::vector<uint8_t>> x = {{0, 0, 1, 1}, {0, 1, 0, 1}};
  EXPECT_EQ(run(ReduceOp::Sum, DType::Bool, x), (std::vector<uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(run(ReduceOp::Min, DType::Bool, x), (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(run(ReduceOp::BXor, DType::Bool, x), (std::vector<uint8_t>{0, 1, 1, 0}));
}

TEST(HostReduce, ComplexNumbers) {
  using C = std::complex<float>;
  const std::vector<std::vector<C>> x = {{{1, 2}}, {{3, -1}}, {{0, 1}}};
  EXPECT_EQ(run(ReduceOp::Sum, DType::C64, x)[0], C(4, 2));
  EXPECT_EQ(run(ReduceOp::Product, DType::C64, x)[0], x[0][0] * x[1][0] * x[2][0]);
}

TEST(HostReduce, NaNWinsMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
    for (const auto& out : {run<float>(op, DType::F32, {{nan, 1}, {1, nan}}),
                            run<float>(op, DType::F32, {{nan, 1}, {1, 2}, {0, nan}})}) {
      EXPECT_TRUE(std::isnan(out[0]));
      EXPECT_TRUE(std::isnan(out[1]));
    }
  }
}

// A sum with zero converts each value there and back: every half must survive.
TEST(HostReduce, EveryHalfSurvivesTheRoundTrip) {
  std::vector<uint16_t> all(65536), zeros(65536, 0x8000);  // -0: the neutral element
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::F16, DType::BF16}) {
    const auto out = run(ReduceOp::Sum, dtype, std::vector<std::vector<uint16_t>>{all, zeros});
    const uint16_t infinity = dtype == DType::F16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i & 0x7fff) > infinity) {
        EXPECT_GT(out[i] & 0x7fff, infinity) << "NaN " << i;
      } else {
        EXPECT_EQ(out[i], i);
      }
    }
  }
}

// Sums of halves are sums in f32, rounded once, to nearest even.
TEST(HostReduce, HalvesAreRoundedOnce) {
  std::mt19937 generator(3);
  for (const int num_sources : {2, 5}) {
    std::vector<std::vector<uint16_t>> sources(static_cast<size_t>(num_sources),
                                               std::vector<uint16_t>(20000));
    for (auto& s : sources) {
      for (auto& x : s) x = static_cast<uint16_t>(generator());
    }
    const auto halves = run(ReduceOp::Sum, DType::F16, sources);
    const auto brains = run(ReduceOp::Sum, DType::BF16, sources);
    for (size_t i = 0; i < halves.size(); ++i) {
      float half_sum = 0, brain_sum = 0;
      for (int s = 0; s < num_sources; ++s) {
        Half half;
        std::memcpy(&half, &sources[s][i], sizeof(half));
        half_sum = s == 0 ? static_cast<float>(half) : half_sum + static_cast<float>(half);
        const float brain = from_bf16(sources[s][i]);
        brain_sum = s == 0 ? brain : brain_sum + brain;
      }
      const Half rounded = static_cast<Half>(half_sum);
      uint16_t expected;
      std::memcpy(&expected, &rounded, sizeof(expected));
      if (std::isnan(half_sum)) {
        EXPECT_GT(halves[i] & 0x7fff, 0x7c00);
      } else {
        ASSERT_EQ(halves[i], expected) << half_sum;
      }
      const float brain = from_bf16(brains[i]);
      if (std::isnan(brain_sum)) {
        EXPECT_TRUE(std::isnan(brain));
      } else if (std::isinf(brain)) {
        EXPECT_GE(std::abs(brain_sum), 3.38e38f);
      } else {
        // Half of the distance to the neighbours, which are 2^-7 of the value's power of two apart.
        const int exponent = brain_sum == 0 ? -126 : std::max(std::ilogb(brain_sum), -126);
        const float ulp = std::ldexp(1.0f, exponent - 7);
        ASSERT_LE(std::abs(brain - brain_sum), ulp / 2) << brain_sum;
      }
    }
  }
}

}  // namespace
}  // namespace gpumode::host
