#pragma once

#include "core/op.h"
#include "optim/arithmetic.h"
#include "optim/job.h"

// States of 8 bits an element, with a scale for each block of them.
//
// kBlock elements that lie beside each other share an exponent, of the largest among them: the
// floats that the 8 bits are count from there. All scales are powers of two, so that scaling is
// exact and an element keeps its bits while the largest one moves. In memory the codes of a tensor
// come first, one byte each, then one exponent for each block, biased as a float's; both fill whole
// vectors of 16 bytes. A tensor of zero bytes is zero. A block that has a NaN, or what is more than
// the largest code of the largest exponent, is NaN as a whole.
//
// What is stored is always rounded by chance: the 0.1 % that an average changes in a step are less
// than half of the distance between two codes, and would be lost. 16 random bits are enough to tell
// how often: elements 2i and 2i + 1 have the lower and the upper half of random_bits(key, i).
namespace gpumode::optim {

constexpr int kBlock = 128;

GPUMODE_HD int64_t in_vectors(int64_t nbytes) { return (nbytes + 15) / 16 * 16; }

GPUMODE_HD int64_t block_exponents_offset(int64_t numel) { return in_vectors(numel); }

GPUMODE_HD int64_t blocks_nbytes(int64_t numel) {
  return block_exponents_offset(numel) + in_vectors((numel + kBlock - 1) / kBlock);
}

// A magnitude of kExponent bits of exponent and 3 of mantissa; kMost is the largest code.
template <int kExponent, uint32_t kMost>
struct Magnitude8 {
  static constexpr int kMantissa = 3, kShift = 23 - kMantissa;
  // Biased, of a block whose exponent is 127.
  static constexpr uint32_t kSmallestNormal = 129u - (1u << kExponent);
  static constexpr uint32_t kFirst = (kSmallestNormal - 1) << 23;
  // Lower ones would make the distance between two codes a subnormal float.
  static constexpr uint32_t kLeastExponent = 128 + kMantissa - kSmallestNormal;
  static constexpr uint32_t kMostExponent = 253;
  static constexpr uint32_t kNotFinite = 255;

  // Of a block, from the bits of its largest magnitude, which is no more than the largest code.
  static GPUMODE_HD uint32_t exponent(uint32_t largest) {
    constexpr uint32_t kAbove = (1u << (kExponent + kMantissa)) - kMost;
    const uint32_t e = (largest + (kAbove << kShift) - 1u) >> 23;
    return e > kMostExponent ? kNotFinite : (e < kLeastExponent ? kLeastExponent : e);
  }
  // What codes are multiplied by, and magnitudes before they become codes.
  static GPUMODE_HD float scale(uint32_t exponent) {
    return float_of(exponent == kNotFinite ? 0x7fc00000u : exponent << 23);
  }
  static GPUMODE_HD float inverse_scale(uint32_t exponent) {
    return float_of((254u - exponent) << 23);
  }

  static GPUMODE_HD float widen(uint32_t code, float scale) {
    const uint32_t u = (code << kShift) + kFirst;
    const float normal = float_of(u);
    // One binade up, where the steps are as wide, without the first value.
    const float subnormal = float_of(u + (1u << 23)) - float_of(kSmallestNormal << 23);
    return float_of(select(code >> kMantissa == 0, bits_of(subnormal), bits_of(normal))) * scale;
  }
  // Of a magnitude times inverse_scale, which is below 2; `random` is below 2^16.
  static GPUMODE_HD uint32_t narrow(float x, uint32_t random) {
    const uint32_t subnormal = bits_of(x + float_of(kSmallestNormal << 23)) - (1u << 23);
    const uint32_t u = select(bits_of(x) < kSmallestNormal << 23, subnormal, bits_of(x));
    return ((u + (random << (kShift - 16))) >> kShift) - (kFirst >> kShift);
  }
};

// Formats. The codes of a block that is not finite are zeros.

// Of any sign: e4m3 as torch.float8_e4m3fn, without its NaN.
struct Signed8 {
  using Magnitude = Magnitude8<4, 0x7e>;
  static GPUMODE_HD float widen(uint8_t code, float scale) {
    const float x = Magnitude::widen(code & 0x7fu, scale);
    return float_of(bits_of(x) | (code & 0x80u) << 24);
  }
  static GPUMODE_HD uint32_t narrow(float x, float inverse_scale, uint32_t random) {
    const float magnitude = float_of(bits_of(x) & 0x7fffffffu);
    return Magnitude::narrow(magnitude * inverse_scale, random) | (bits_of(x) >> 24 & 0x80u);
  }
};

// Squares, or averages of them. None becomes zero, since steps are divided by their roots.
struct Square8 {
  using Magnitude = Magnitude8<5, 0xff>;
  static GPUMODE_HD float widen(uint8_t code, float scale) { return Magnitude::widen(code, scale); }
  static GPUMODE_HD uint32_t narrow(float x, float inverse_scale, uint32_t random) {
    const float magnitude = float_of(bits_of(x) & 0x7fffffffu);  // negative ones are nobody's
    const uint32_t code = Magnitude::narrow(magnitude * inverse_scale, random);
    return code > 1u ? code : 1u;
  }
};

}  // namespace gpumode::optim
