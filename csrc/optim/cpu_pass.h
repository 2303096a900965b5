#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "optim/blocks.h"
#include "optim/update.h"

// One pass of an update over a piece of a tensor, on the CPU. Values are widened into short buffers
// that stay in the first cache, updated by a loop that the compiler turns into vectors, and
// narrowed again; what lies in memory as it is computed in is updated there.
namespace gpumode::optim {

constexpr int kChunk = 256;

struct Piece {
  const Job* job;
  int64_t begin, length;  // in elements of the tensor, in row-major order if it has strides
};

// --------------------------------------------------------------------------------------- in memory

// Calls f(offset, i) with the offset of element begin + i for i = 0 ... length - 1.
template <class F>
GPUMODE_HD void for_each_offset(const Job& job, const int64_t* strides, int64_t begin, int length,
                                F f) {
  int64_t index[kMaxDims];
  int64_t offset = 0;
  for (int d = job.num_dims - 1; d >= 0; --d) {
    index[d] = begin % job.sizes[d];
    begin /= job.sizes[d];
    offset += index[d] * strides[d];
  }
  for (int i = 0; i < length; ++i) {
    f(offset, i);
    for (int d = job.num_dims - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < job.sizes[d]) break;
      offset -= index[d] * strides[d];
      index[d] = 0;
    }
  }
}

// The values of an operand, one after the other: where they lie, or collected in `buffer`.
template <class Raw>
GPUMODE_HD Raw* collect(const Job& job, const Operand& operand, int64_t begin, int length,
                        Raw* buffer) {
  auto* data = static_cast<Raw*>(operand.data);
  if (operand.strides == nullptr) return data + begin;
  for_each_offset(job, operand.strides, begin, length,
                  [&](int64_t offset, int i) { buffer[i] = data[offset]; });
  return buffer;
}

// Where `length` values may be put before they are spread.
template <class Raw>
GPUMODE_HD Raw* place(const Operand& operand, int64_t begin, Raw* buffer) {
  return operand.strides == nullptr ? static_cast<Raw*>(operand.data) + begin : buffer;
}

template <class Raw>
GPUMODE_HD void spread(const Job& job, const Operand& operand, int64_t begin, int length,
                       const Raw* values) {
  if (operand.strides == nullptr) return;
  auto* data = static_cast<Raw*>(operand.data);
  for_each_offset(job, operand.strides, begin, length,
                  [&](int64_t offset, int i) { data[offset] = values[i]; });
}

// ----------------------------------------------------------------------------------------- as T

template <class Format, class T>
GPUMODE_HD T* load_as(const Job& job, const Operand& operand, int64_t begin, int length,
                      T* buffer) {
  using Raw = typename Format::Raw;
  Raw raw[kChunk];
  const Raw* values = collect(job, operand, begin, length, raw);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) buffer[i] = static_cast<T>(Format::widen(values[i]));
  return buffer;
}

// The operand's values in T: where they lie, or in `buffer`.
template <class T>
GPUMODE_HD T* load(const Job& job, const Operand& operand, int64_t begin, int length, T* buffer) {
  constexpr DType kOwn = std::is_same_v<T, float> ? DType::F32 : DType::F64;
  if (operand.dtype == kOwn) return collect(job, operand, begin, length, buffer);
  switch (operand.dtype) {
    case DType::F32:
      return load_as<F32>(job, operand, begin, length, buffer);
    case DType::F64:
      return load_as<F64>(job, operand, begin, length, buffer);
    case DType::BF16:
      return load_as<BF16>(job, operand, begin, length, buffer);
    default:
      return load_as<F16>(job, operand, begin, length, buffer);
  }
}

template <class Format, class T, class Narrow>
GPUMODE_HD void store_as(const Job& job, const Operand& operand, int64_t begin, int length,
                         const T* values, Narrow narrow) {
  using Raw = typename Format::Raw;
  Raw raw[kChunk];
  Raw* to = place(operand, begin, raw);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) to[i] = narrow(values[i], i);
  spread(job, operand, begin, length, to);
}

template <class T>
GPUMODE_HD void store(const Job& job, const Operand& operand, int64_t begin, int length,
                      const T* values, const uint32_t* random_key) {
  constexpr DType kOwn = std::is_same_v<T, float> ? DType::F32 : DType::F64;
  if (operand.dtype == kOwn) return spread(job, operand, begin, length, values);
  switch (operand.dtype) {
    case DType::F32:
      return store_as<F32>(job, operand, begin, length, values,
                           [](T x, int) { return F32::narrow(static_cast<float>(x)); });
    case DType::F64:
      return store_as<F64>(job, operand, begin, length, values,
                           [](T x, int) { return F64::narrow(x); });
    case DType::BF16:
      if (random_key != nullptr) {
        const uint32_t key = *random_key, first = static_cast<uint32_t>(begin);
        return store_as<BF16>(job, operand, begin, length, values, [=](T x, int i) {
          const uint32_t index = first + static_cast<uint32_t>(i);
          return BF16::narrow(static_cast<float>(x), random_bits(key, index));
        });
      }
      return store_as<BF16>(job, operand, begin, length, values,
                            [](T x, int) { return BF16::narrow(static_cast<float>(x)); });
    default:
      return store_as<F16>(job, operand, begin, length, values,
                           [](T x, int) { return F16::narrow(static_cast<float>(x)); });
  }
}

// ---------------------------------------------------------------------------- states of 8 bits

// They lie as the elements do, and chunks begin where blocks do.
static_assert(kChunk % kBlock == 0);

template <class Format, class T>
GPUMODE_HD void load_blocks(const Job& job, const Operand& operand, int64_t begin, int length,
                            T* buffer) {
  const auto* codes = static_cast<const uint8_t*>(operand.data);
  const uint8_t* exponents = codes + block_exponents_offset(job.numel) + begin / kBlock;
  codes += begin;
  for (int first = 0; first < length; first += kBlock) {
    const float scale = Format::Magnitude::scale(*exponents++);
    const int end = std::min(first + kBlock, length);
#pragma GCC ivdep
    for (int i = first; i < end; ++i) buffer[i] = static_cast<T>(Format::widen(codes[i], scale));
  }
}

template <class Format, class T>
GPUMODE_HD void store_blocks(const Job& job, const Operand& operand, int64_t begin, int length,
                             const T* values, uint32_t random_key) {
  using Magnitude = typename Format::Magnitude;
  auto* codes = static_cast<uint8_t*>(operand.data);
  uint8_t* exponents = codes + block_exponents_offset(job.numel) + begin / kBlock;
  codes += begin;
  for (int first = 0; first < length; first += kBlock) {
    const int end = std::min(first + kBlock, length);
    uint32_t largest = 0;
    for (int i = first; i < end; ++i) {
      const uint32_t u = bits_of(static_cast<float>(values[i])) & 0x7fffffffu;
      largest = u > largest ? u : largest;
    }
    const uint32_t exponent = Magnitude::exponent(largest);
    *exponents++ = static_cast<uint8_t>(exponent);
    if (exponent == Magnitude::kNotFinite) {
      std::fill(codes + first, codes + end, uint8_t{0});
      continue;
    }
    const float inverse_scale = Magnitude::inverse_scale(exponent);
    uint32_t words[kBlock / 2];
    uint16_t random[kBlock];
    const auto pair = static_cast<uint32_t>(begin + first) / 2;
    for (uint32_t i = 0; i < kBlock / 2; ++i) words[i] = random_bits(random_key, pair + i);
    std::memcpy(random, words, sizeof(random));
#pragma GCC ivdep
    for (int i = first; i < end; ++i) {
      codes[i] = static_cast<uint8_t>(
          Format::narrow(static_cast<float>(values[i]), inverse_scale, random[i - first]));
    }
  }
}

// -------------------------------------------------------------------------------- the parameter

// Where the parameter is not what was rounded from its master, somebody has written it since.
template <class Half, class T>
GPUMODE_HD void take_what_was_written(const Job& job, int64_t begin, int length, T* masters) {
  uint16_t raw[kChunk];
  const uint16_t* values = collect(job, job.param, begin, length, raw);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) {
    const auto master = static_cast<float>(masters[i]);
    const float written = Half::widen(values[i]);
    masters[i] = values[i] == Half::narrow(master) ? master : written;
  }
}

template <class T>
GPUMODE_HD T* load_param(const Job& job, int64_t begin, int length, T* buffer) {
  if (job.master_kind == Master::None) return load(job, job.param, begin, length, buffer);
  if (job.master_kind == Master::F32) {
    T* masters = load(job, job.master, begin, length, buffer);
    if (job.param.dtype == DType::BF16) {
      take_what_was_written<BF16>(job, begin, length, masters);
    } else {
      take_what_was_written<F16>(job, begin, length, masters);
    }
    return masters;
  }
  uint16_t high_raw[kChunk];
  int16_t remainder_raw[kChunk];
  const uint16_t* high = collect(job, job.param, begin, length, high_raw);
  const int16_t* remainder = collect(job, job.master, begin, length, remainder_raw);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) buffer[i] = static_cast<T>(join(high[i], remainder[i]));
  return buffer;
}

template <class T>
GPUMODE_HD void store_param(const Job& job, int64_t begin, int length, const T* values,
                            const uint32_t* random_key) {
  if (job.master_kind != Master::Remainder16) {
    const bool has_master = job.master_kind == Master::F32;
    if (has_master) store(job, job.master, begin, length, values, nullptr);
    return store(job, job.param, begin, length, values, has_master ? nullptr : random_key);
  }
  uint16_t high_raw[kChunk];
  int16_t remainder_raw[kChunk];
  uint16_t* high = place(job.param, begin, high_raw);
  int16_t* remainder = place(job.master, begin, remainder_raw);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) split(static_cast<float>(values[i]), &high[i], &remainder[i]);
  spread(job, job.param, begin, length, high);
  spread(job, job.master, begin, length, remainder);
}

// ------------------------------------------------------------------------------------- the pass

// Adds up in double, in a fixed order of its own.
template <class T>
GPUMODE_HD double sum(const T* terms, int length) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(terms[i + lane]);
  }
  for (; i < length; ++i) lanes[0] += static_cast<double>(terms[i]);
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
}

// One chunk. `sums` receives the sums of the update's terms.
template <class T, class Update>
GPUMODE_HD void run_chunk(const Job& job, const StepOptions& options, const Update& update,
                          int64_t begin, int length, double* sums) {
  constexpr int kStates = Update::kNumStates, kSums = Update::kNumSums;
  constexpr unsigned kAccess = Update::kAccess;
  alignas(64) T p_buffer[kChunk], g_buffer[kChunk];
  alignas(64) T s_buffer[kStates + 1][kChunk];
  alignas(64) T terms[kSums + 1][kChunk];
  T* p = p_buffer;
  const T* g = g_buffer;
  T* s[kStates + 1];
  if (kAccess & kReadsParam) p = load_param(job, begin, length, p_buffer);
  if (kAccess & kReadsGrad) g = load(job, job.grad, begin, length, g_buffer);
  for (int k = 0; k < kStates; ++k) {
    s[k] = s_buffer[k];
    const Operand& state = job.states[k];
    if (state.data == nullptr) {
      std::fill_n(s_buffer[k], length, T(0));
    } else if (state.dtype != DType::U8) {
      s[k] = load(job, state, begin, length, s_buffer[k]);
    } else if (Update::kSquares >> k & 1) {
      load_blocks<Square8>(job, state, begin, length, s_buffer[k]);
    } else {
      load_blocks<Signed8>(job, state, begin, length, s_buffer[k]);
    }
  }
  const T factor = static_cast<T>(options.grad_factor);
#pragma GCC ivdep
  for (int i = 0; i < length; ++i) {
    T at_p = p[i];
    T at_states[kStates + 1], at_terms[kSums + 1];
    for (int k = 0; k < kStates; ++k) at_states[k] = s[k][i];
    update(at_p, g[i] * factor, at_states, at_terms);
    if (kAccess & kWritesParam) p[i] = at_p;
    for (int k = 0; k < kStates && kAccess & kWritesStates; ++k) s[k][i] = at_states[k];
    for (int k = 0; k < kSums; ++k) terms[k][i] = at_terms[k];
  }
  // A chunk begins at a multiple of its length, and so has one key.
  const auto key = [&](uint32_t operand) {
    const auto step = static_cast<uint64_t>(job.step);
    return random_key_at(random_key(job.seed, step, job.number, operand), begin);
  };
  if (kAccess & kWritesParam) {
    const uint32_t random = job.stochastic ? key(0) : 0;
    store_param(job, begin, length, p, job.stochastic ? &random : nullptr);
  }
  for (uint32_t k = 0; k < kStates && kAccess & kWritesStates; ++k) {
    const Operand& state = job.states[k];
    if (state.data == nullptr) continue;
    const bool is_packed = state.dtype == DType::U8;
    const uint32_t random = job.stochastic || is_packed ? key(1 + k) : 0;
    if (!is_packed) {
      store(job, state, begin, length, s[k], job.stochastic ? &random : nullptr);
    } else if (Update::kSquares >> k & 1) {
      store_blocks<Square8>(job, state, begin, length, s[k], random);
    } else {
      store_blocks<Signed8>(job, state, begin, length, s[k], random);
    }
  }
  for (int k = 0; k < kSums; ++k) sums[k] += sum(terms[k], length);
}

// `sums` of the first of the pieces; each piece has kMaxSums.
template <class T, template <class> class Update>
GPUMODE_HD void run_pieces_as(const Piece* pieces, int64_t num_pieces, const StepOptions& options,
                              double* sums) {
  constexpr bool kIsOfTensor = (Update<T>::kAccess & kIsOfItsTensor) != 0;
  const Job* last = pieces->job;
  Update<T> update(*last);
  for (int64_t i = 0; i < num_pieces; ++i, sums += kMaxSums) {
    const Job& job = *pieces[i].job;
    const bool is_as_last = job.hyper == last->hyper && job.step == last->step && !kIsOfTensor;
    if (&job != last && !is_as_last) update = Update<T>(job);
    last = &job;
    const int64_t end = pieces[i].begin + pieces[i].length;
    for (int64_t begin = pieces[i].begin; begin < end; begin += kChunk) {
      const int length = static_cast<int>(std::min<int64_t>(kChunk, end - begin));
      run_chunk<T>(job, options, update, begin, length, sums);
    }
  }
}

#if defined(__x86_64__)
template <class T, template <class> class Update>
__attribute__((noinline,
               target("avx2"))) void run_pieces_avx2(const Piece* pieces, int64_t num_pieces,
                                                     const StepOptions& options, double* sums) {
  run_pieces_as<T, Update>(pieces, num_pieces, options, sums);
}
#endif

// Once for every x86-64 and once for those with AVX2. Both give the same bits.
template <class T, template <class> class Update>
void run_pieces_in(const Piece* pieces, int64_t num_pieces, const StepOptions& options,
                   double* sums) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return run_pieces_avx2<T, Update>(pieces, num_pieces, options, sums);
#endif
  run_pieces_as<T, Update>(pieces, num_pieces, options, sums);
}

// Updates pieces of tensors. `sums`, kMaxSums per piece, receives the sums of the update's terms.
template <template <class> class Update>
void run_pieces(const Piece* pieces, int64_t num_pieces, const StepOptions& options, double* sums) {
  const auto is_double = [](const Piece& piece) { return piece.job->param.dtype == DType::F64; };
  for (int64_t begin = 0, end = 0; begin < num_pieces; begin = end) {
    const bool in_double = is_double(pieces[begin]);
    while (end < num_pieces && is_double(pieces[end]) == in_double) ++end;
    const auto run = in_double ? run_pieces_in<double, Update> : run_pieces_in<float, Update>;
    run(pieces + begin, end - begin, options, sums + begin * kMaxSums);
  }
}

}  // namespace gpumode::optim
