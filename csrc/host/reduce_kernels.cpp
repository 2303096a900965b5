#include "host/reduce_kernels.h"

#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The loops inline into one function per instruction set, so that the compiler translates the same
// source for each; see run() below.
#define INLINE inline __attribute__((always_inline))

namespace gpumode::host {
namespace {

// Vectors are written out: what the compiler finds by itself depends on its version and on what it
// must assume of NaNs, and was ten times slower for half of the types. They have 32 bytes of what
// is accumulated in; where the machine's are shorter, the compiler takes two.
constexpr size_t kVectorBytes = 32;

template <class A>
struct VectorOf {
  using type __attribute__((vector_size(kVectorBytes))) = A;
};
template <class A>
using Vector = typename VectorOf<A>::type;

using Floats = Vector<float>;
using Words = Vector<uint32_t>;
using Halves __attribute__((vector_size(kVectorBytes / 2))) = uint16_t;

INLINE Words bits(Floats x) { return reinterpret_cast<Words>(x); }
INLINE Floats from_bits(Words u) { return reinterpret_cast<Floats>(u); }
INLINE Words select(Words mask, Words a, Words b) { return (a & mask) | (b & ~mask); }
// All bits where a > b. Both below 2^31: machines compare signed numbers.
INLINE Words above(Words a, int32_t b) {
  return reinterpret_cast<Words>(reinterpret_cast<Vector<int32_t>>(a) > b);
}

// How values of a type lie in memory (Raw), and what they are accumulated in (Acc).
template <class T>
struct Plain {
  using Acc = T;
  using Raw = Vector<T>;
  static INLINE Vector<T> widen(Raw raw) { return raw; }
  static INLINE Raw narrow(Vector<T> x) { return x; }
};

// The two half formats, converted with integer arithmetic, for which no machine needs an extension.
// Both round to nearest even.
struct BF16 {
  using Acc = float;
  using Raw = Halves;
  static INLINE Floats widen(Raw raw) {
    return from_bits(__builtin_convertvector(raw, Words) << 16);
  }
  static INLINE Raw narrow(Floats x) {
    const Words u = bits(x);
    const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const Words nan = (u >> 16) | 0x40;
    const Words is_nan = above(u & 0x7fffffff, 0x7f800000);
    return __builtin_convertvector(select(is_nan, nan, rounded), Halves);
  }
};

struct F16 {
  using Acc = float;
  using Raw = Halves;
  static INLINE Floats widen(Raw raw) {
    const Words h = __builtin_convertvector(raw, Words);
    const Words magnitude = h & 0x7fff;
    const Words normal = (magnitude << 13) + 0x38000000;  // the exponent's bias: 127 - 15
    // In the binade of 0.5f the smallest subnormal is one ulp. Nothing here computes with f32's own
    // subnormals, which take a hundred times longer.
    const Words subnormal = bits(from_bits(magnitude | 0x3f000000) - 0.5f);
    Words u = select(above(magnitude, 0x3ff), normal, subnormal);
    // Infinity and NaN have all bits of the exponent.
    u |= above(magnitude, 0x7bff) & 0x7f800000;
    return from_bits(u | (h & 0x8000) << 16);
  }
  static INLINE Raw narrow(Floats x) {
    const Words sign = (bits(x) >> 16) & 0x8000;
    const Words u = bits(x) & 0x7fffffff;
    const Words normal = (u + 0xfff + ((u >> 13) & 1) - 0x38000000) >> 13;
    // As above: the addition rounds to a multiple of the smallest subnormal.
    const Words subnormal = bits(from_bits(u) + 0.5f) - 0x3f000000;
    Words h = select(above(u, 0x387fffff), normal, subnormal);
    const Words infinity = Words{} + 0x7c00, nan = Words{} + 0x7e00;
    h = select(above(u, 0x477fffff), infinity, h);  // 2^16 and above
    h = select(above(u, 0x7f800000), nan, h);
    return __builtin_convertvector(h | sign, Halves);
  }
};

// Integers wrap, which is defined for unsigned ones only.
template <class A, bool = std::is_integral_v<A>>
struct WrappingOf {
  using type = Vector<A>;
};
template <class A>
struct WrappingOf<A, true> {
  using type = Vector<std::make_unsigned_t<A>>;
};
template <class A>
using Wrapping = typename WrappingOf<A>::type;

template <class A>
struct Add {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const {
    using W = Wrapping<A>;
    return reinterpret_cast<Vector<A>>(reinterpret_cast<W>(a) + reinterpret_cast<W>(b));
  }
};
template <class A>
struct Multiply {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const {
    using W = Wrapping<A>;
    return reinterpret_cast<Vector<A>>(reinterpret_cast<W>(a) * reinterpret_cast<W>(b));
  }
};
template <class A>
struct Min {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const {
    return ((a < b) | (a != a)) ? a : b;
  }
};
template <class A>
struct Max {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const {
    return ((a > b) | (a != a)) ? a : b;
  }
};
template <class A>
struct And {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const { return a & b; }
};
template <class A>
struct Or {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const { return a | b; }
};
template <class A>
struct Xor {
  INLINE Vector<A> operator()(Vector<A> a, Vector<A> b) const { return a ^ b; }
};

// What is done to each source first, and to the result last.
template <class A>
struct Keep {
  INLINE Vector<A> operator()(Vector<A> a) const { return a; }
};
template <class A>
struct DivideBy {
  A divisor;
  INLINE Vector<A> operator()(Vector<A> a) const { return a / divisor; }
};
template <class A>
struct MultiplyBy {
  A factor;
  INLINE Vector<A> operator()(Vector<A> a) const { return Multiply<A>()(a, Vector<A>{} + factor); }
};

struct Job {
  Reduction reduction;
  const std::byte* const* sources;
  int num_sources;
  size_t nbytes;
  std::byte* dst;
  std::byte* also;
};

template <class T, class Op, class Prepare, class Finish>
INLINE typename T::Raw reduce_vector(const Job& job, size_t offset, size_t nbytes, Op op,
                                     Prepare prepare, Finish finish) {
  const auto load = [&](int source) __attribute__((always_inline)) {
    typename T::Raw raw{};
    std::memcpy(&raw, job.sources[source] + offset, nbytes);
    return prepare(T::widen(raw));
  };
  auto acc = load(0);
  for (int s = 1; s < job.num_sources; ++s) acc = op(acc, load(s));
  return T::narrow(finish(acc));
}

template <class T, class Op, class Prepare, class Finish>
INLINE void loop(const Job& job, Op op, Prepare prepare, Finish finish) {
  constexpr size_t kStep = sizeof(typename T::Raw);
  size_t offset = 0;
  const auto store = [&](typename T::Raw raw, size_t nbytes) __attribute__((always_inline)) {
    std::memcpy(job.dst + offset, &raw, nbytes);
    if (job.also != nullptr) std::memcpy(job.also + offset, &raw, nbytes);
  };
  for (; offset + kStep <= job.nbytes; offset += kStep) {
    store(reduce_vector<T>(job, offset, kStep, op, prepare, finish), kStep);
  }
  // The rest, in a vector that is not full.
  const size_t rest = job.nbytes - offset;
  if (rest > 0) store(reduce_vector<T>(job, offset, rest, op, prepare, finish), rest);
}

#if defined(__x86_64__)
template <class T, class Op, class Prepare, class Finish>
__attribute__((noinline, target("avx2"))) void loop_avx2(const Job& job, Op op, Prepare prepare,
                                                         Finish finish) {
  loop<T>(job, op, prepare, finish);
}
#endif

// Once for every x86-64 and once for those with AVX2. Wider vectors gain nothing: the loops wait
// for memory.
template <class T, class Op, class Prepare = Keep<typename T::Acc>,
          class Finish = Keep<typename T::Acc>>
void run(const Job& job, Op op, Prepare prepare = {}, Finish finish = {}) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return loop_avx2<T>(job, op, prepare, finish);
#endif
  loop<T>(job, op, prepare, finish);
}

template <class T>
void reduce_arithmetic(const Job& job) {
  using A = typename T::Acc;
  switch (job.reduction.op) {
    case ReduceOp::Sum:
      return run<T>(job, Add<A>());
    case ReduceOp::Product:
      return run<T>(job, Multiply<A>());
    case ReduceOp::Min:
      return run<T>(job, Min<A>());
    case ReduceOp::Max:
      return run<T>(job, Max<A>());
    case ReduceOp::Avg:
      return run<T>(job, Add<A>(), Keep<A>(), DivideBy<A>{static_cast<A>(job.num_sources)});
    case ReduceOp::PreMulSum:
      return run<T>(job, Add<A>(), MultiplyBy<A>{static_cast<A>(job.reduction.factor)});
    default:
      assert(false && "supports() lets no bitwise op through");
  }
}

template <class A>
void reduce_integers(const Job& job) {
  switch (job.reduction.op) {
    case ReduceOp::BAnd:
      return run<Plain<A>>(job, And<A>());
    case ReduceOp::BOr:
      return run<Plain<A>>(job, Or<A>());
    case ReduceOp::BXor:
      return run<Plain<A>>(job, Xor<A>());
    default:
      return reduce_arithmetic<Plain<A>>(job);
  }
}

void reduce_bools(const Job& job) {
  using Bool = Plain<uint8_t>;
  switch (job.reduction.op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::BOr:
      return run<Bool>(job, Or<uint8_t>());
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::BAnd:
      return run<Bool>(job, And<uint8_t>());
    case ReduceOp::BXor:
      return run<Bool>(job, Xor<uint8_t>());
    default:
      assert(false && "supports() lets no average of bools through");
  }
}

// Complex numbers are pairs, and only their product is more than two real reductions. It is rare
// enough for a plain loop.
template <class R>
void multiply_complex(const Job& job) {
  struct Complex {
    R re, im;
  };
  const auto at = [&](int source, size_t i) {
    return reinterpret_cast<const Complex*>(job.sources[source])[i];
  };
  for (size_t i = 0; i < job.nbytes / sizeof(Complex); ++i) {
    Complex a = at(0, i);
    for (int s = 1; s < job.num_sources; ++s) {
      const Complex b = at(s, i);
      a = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
    reinterpret_cast<Complex*>(job.dst)[i] = a;
    if (job.also != nullptr) reinterpret_cast<Complex*>(job.also)[i] = a;
  }
}

template <class R>
void reduce_complex(const Job& job) {
  if (job.reduction.op == ReduceOp::Product) return multiply_complex<R>(job);
  reduce_arithmetic<Plain<R>>(job);
}

}  // namespace

void reduce(const Reduction& reduction, const std::byte* const* sources, int num_sources,
            size_t nbytes, std::byte* dst, std::byte* also) {
  const Job job{reduction, sources, num_sources, nbytes, dst, also};
  switch (reduction.dtype) {
    case DType::F16:
      return reduce_arithmetic<F16>(job);
    case DType::BF16:
      return reduce_arithmetic<BF16>(job);
    case DType::F32:
      return reduce_arithmetic<Plain<float>>(job);
    case DType::F64:
      return reduce_arithmetic<Plain<double>>(job);
    case DType::I8:
      return reduce_integers<int8_t>(job);
    case DType::U8:
      return reduce_integers<uint8_t>(job);
    case DType::I16:
      return reduce_integers<int16_t>(job);
    case DType::U16:
      return reduce_integers<uint16_t>(job);
    case DType::I32:
      return reduce_integers<int32_t>(job);
    case DType::U32:
      return reduce_integers<uint32_t>(job);
    case DType::I64:
      return reduce_integers<int64_t>(job);
    case DType::U64:
      return reduce_integers<uint64_t>(job);
    case DType::Bool:
      return reduce_bools(job);
    case DType::C64:
      return reduce_complex<float>(job);
    case DType::C128:
      return reduce_complex<double>(job);
    default:
      assert(false && "supports() lets no reduction of a type through that only moves");
  }
}

}  // namespace gpumode::host
