#include "host/reduce_kernels.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The loops inline into one function per instruction set, so that the compiler vectorises the same
// source for each; see run() below.
#define INLINE inline __attribute__((always_inline))

namespace gpumode::host {
namespace {

INLINE uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

INLINE float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
}

// The two half formats as conversions in plain integer arithmetic: no branch, so they vectorise
// without the instructions that only some machines have. Both round to nearest even.
struct BF16 {
  uint16_t raw;
  INLINE float widen() const { return from_bits(uint32_t{raw} << 16); }
  static INLINE BF16 narrow(float x) {
    const uint32_t u = bits(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40;
    return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
  }
};

struct F16 {
  uint16_t raw;
  INLINE float widen() const {
    const uint32_t magnitude = raw & 0x7fffu;
    // Scaling by 2^112 moves the exponent's bias and normalises subnormals on the way.
    uint32_t u = bits(from_bits(magnitude << 13) * 0x1p112f);
    u |= magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    return from_bits(u | (raw & 0x8000u) << 16);
  }
  static INLINE F16 narrow(float x) {
    const uint32_t sign = (bits(x) >> 16) & 0x8000;
    const uint32_t u = bits(x) & 0x7fffffff;
    const uint32_t normal = (u + 0xfff + ((u >> 13) & 1) - 0x38000000) >> 13;
    // 0.5f has the ulp of the smallest subnormal, so the addition rounds to a multiple of it.
    const uint32_t subnormal = bits(from_bits(u) + 0.5f) - 0x3f000000;
    uint32_t h = u < 0x38800000 ? subnormal : normal;
    h = u >= 0x47800000 ? 0x7c00 : h;  // 2^16 and above: infinity
    h = u > 0x7f800000 ? 0x7e00 : h;   // NaN
    return {static_cast<uint16_t>(h | sign)};
  }
};

// Complex numbers are pairs; only their product is more than two real reductions.
template <class R>
struct Complex {
  R re, im;
};

template <class T>
struct Widened {
  using type = T;
};
template <>
struct Widened<F16> {
  using type = float;
};
template <>
struct Widened<BF16> {
  using type = float;
};
template <class T>
using Acc = typename Widened<T>::type;

template <class T>
INLINE Acc<T> widen(T x) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return x;
  } else {
    return x.widen();
  }
}

template <class T>
INLINE T narrow(Acc<T> x) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return x;
  } else {
    return T::narrow(x);
  }
}

// Integers wrap, which is defined for unsigned types only.
template <class A, bool = std::is_integral_v<A>>
struct Wrapping {
  using type = A;
};
template <class A>
struct Wrapping<A, true> {
  // At least int-sized: narrower unsigned types would promote to int and overflow.
  using type = std::conditional_t<(sizeof(A) < 4), uint32_t, std::make_unsigned_t<A>>;
};
template <class A>
using Wrap = typename Wrapping<A>::type;

struct Add {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return static_cast<A>(static_cast<Wrap<A>>(a) + static_cast<Wrap<A>>(b));
  }
};
struct Multiply {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return static_cast<A>(static_cast<Wrap<A>>(a) * static_cast<Wrap<A>>(b));
  }
  template <class R>
  INLINE Complex<R> operator()(Complex<R> a, Complex<R> b) const {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
struct Min {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};
struct And {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return static_cast<A>(a & b);
  }
};
struct Or {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return static_cast<A>(a | b);
  }
};
struct Xor {
  template <class A>
  INLINE A operator()(A a, A b) const {
    return static_cast<A>(a ^ b);
  }
};

struct Job {
  Reduction reduction;
  const std::byte* const* sources;
  int num_sources;
  size_t nbytes;
  std::byte* dst;
  std::byte* also;
};

template <class T>
INLINE const T* as(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

// Two sources, nothing to scale: the common case of the large all-reduce between two ranks, and
// worth a loop of its own that keeps everything in registers. The pragma's promise holds: dst may
// be a source, but then at the same index.
template <class T, class Op>
INLINE void reduce_pair(const Job& job, Op op) {
  const T* a = as<T>(job.sources[0]);
  const T* b = as<T>(job.sources[1]);
  T* dst = reinterpret_cast<T*>(job.dst);
  T* also = reinterpret_cast<T*>(job.also);
  const size_t n = job.nbytes / sizeof(T);
  if (also == nullptr) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) dst[i] = narrow<T>(op(widen(a[i]), widen(b[i])));
    return;
  }
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const T x = narrow<T>(op(widen(a[i]), widen(b[i])));
    dst[i] = x;
    also[i] = x;
  }
}

// Block by block through an accumulator that stays in the first-level cache.
template <class T, class Op, class Prepare, class Finish>
INLINE void reduce_blocks(const Job& job, Op op, Prepare prepare, Finish finish) {
  constexpr size_t kBlock = 1024;
  Acc<T> acc[kBlock];
  const size_t n = job.nbytes / sizeof(T);
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    const T* first = as<T>(job.sources[0]) + begin;
    for (size_t i = 0; i < count; ++i) acc[i] = prepare(widen(first[i]));
    for (int s = 1; s < job.num_sources; ++s) {
      const T* next = as<T>(job.sources[s]) + begin;
      for (size_t i = 0; i < count; ++i) acc[i] = op(acc[i], prepare(widen(next[i])));
    }
    T* dst = reinterpret_cast<T*>(job.dst) + begin;
    for (size_t i = 0; i < count; ++i) dst[i] = narrow<T>(finish(acc[i]));
    if (job.also != nullptr) {
      std::memcpy(job.also + begin * sizeof(T), dst, count * sizeof(T));
    }
  }
}

struct Keep {
  template <class A>
  INLINE A operator()(A a) const {
    return a;
  }
};
template <class A>
struct DivideBy {
  A divisor;
  INLINE A operator()(A a) const { return static_cast<A>(a / divisor); }
};
template <class A>
struct MultiplyBy {
  A factor;
  INLINE A operator()(A a) const { return Multiply()(a, factor); }
};

// The loops, instantiated once for every x86-64 and once for those with AVX2. Wider vectors gain
// nothing: the loops wait for memory.
template <class T, class Op, class Prepare, class Finish>
INLINE void loops(const Job& job, Op op, Prepare prepare, Finish finish) {
  constexpr bool plain = std::is_same_v<Prepare, Keep> && std::is_same_v<Finish, Keep>;
  if (plain && job.num_sources == 2) {
    reduce_pair<T>(job, op);
  } else {
    reduce_blocks<T>(job, op, prepare, finish);
  }
}

#if defined(__x86_64__)
template <class T, class Op, class Prepare, class Finish>
__attribute__((noinline, target("avx2"))) void loops_avx2(const Job& job, Op op, Prepare prepare,
                                                          Finish finish) {
  loops<T>(job, op, prepare, finish);
}
#endif

template <class T, class Op, class Prepare = Keep, class Finish = Keep>
void run(const Job& job, Op op, Prepare prepare = {}, Finish finish = {}) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return loops_avx2<T>(job, op, prepare, finish);
#endif
  loops<T>(job, op, prepare, finish);
}

template <class T>
void reduce_arithmetic(const Job& job) {
  using A = Acc<T>;
  switch (job.reduction.op) {
    case ReduceOp::Sum:
      return run<T>(job, Add());
    case ReduceOp::Product:
      return run<T>(job, Multiply());
    case ReduceOp::Min:
      return run<T>(job, Min());
    case ReduceOp::Max:
      return run<T>(job, Max());
    case ReduceOp::Avg:
      return run<T>(job, Add(), Keep(), DivideBy<A>{static_cast<A>(job.num_sources)});
    case ReduceOp::PreMulSum:
      return run<T>(job, Add(), MultiplyBy<A>{static_cast<A>(job.reduction.factor)});
    default:
      assert(false && "supports() lets no bitwise op through");
  }
}

template <class T>
void reduce_integers(const Job& job) {
  switch (job.reduction.op) {
    case ReduceOp::BAnd:
      return run<T>(job, And());
    case ReduceOp::BOr:
      return run<T>(job, Or());
    case ReduceOp::BXor:
      return run<T>(job, Xor());
    default:
      return reduce_arithmetic<T>(job);
  }
}

void reduce_bools(const Job& job) {
  switch (job.reduction.op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::BOr:
      return run<uint8_t>(job, Or());
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::BAnd:
      return run<uint8_t>(job, And());
    case ReduceOp::BXor:
      return run<uint8_t>(job, Xor());
    default:
      assert(false && "supports() lets no average of bools through");
  }
}

template <class R>
void reduce_complex(const Job& job) {
  if (job.reduction.op == ReduceOp::Product) return run<Complex<R>>(job, Multiply());
  reduce_arithmetic<R>(job);
}

}  // namespace

void reduce(const Reduction& reduction, const std::byte* const* sources, int num_sources,
            size_t nbytes, std::byte* dst, std::byte* also) {
  const Job job{reduction, sources, num_sources, nbytes, dst, also};
  switch (job.reduction.dtype) {
    case DType::F16:
      return reduce_arithmetic<F16>(job);
    case DType::BF16:
      return reduce_arithmetic<BF16>(job);
    case DType::F32:
      return reduce_arithmetic<float>(job);
    case DType::F64:
      return reduce_arithmetic<double>(job);
    case DType::I8:
      return reduce_integers<int8_t>(job);
    case DType::U8:
      return reduce_integers<uint8_t>(job);
    case DType::I16:
      return reduce_integers<int16_t>(job);
    case DType::I32:
      return reduce_integers<int32_t>(job);
    case DType::I64:
      return reduce_integers<int64_t>(job);
    case DType::Bool:
      return reduce_bools(job);
    case DType::C64:
      return reduce_complex<float>(job);
    case DType::C128:
      return reduce_complex<double>(job);
  }
}

}  // namespace gpumode::host
