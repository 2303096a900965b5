#pragma once

#include "core/op.h"
#include "optim/arithmetic.h"
#include "optim/job.h"

// States of 8 bits an element, with a scale for each block of them.
//
// kBlock elements that lie beside each other share an exponent, of the largest among them: the
// floats that the 8 bits are count from there. All scales are powers of two, so that scaling is
// exact and an element keeps its bits while the largest one moves. In memory the codes of a tensor
// come first, one byte each, then from a multiple of 16 bytes on one exponent for each block,
// biased as a float's. A tensor of zero bytes is zero. A block that has a NaN, or what is more than
// the largest code of the largest exponent, is NaN as a whole.
//
// What is stored is always rounded by chance: the 0.1 % that an average changes in a step are less
// than half of the distance between two codes, and would be lost.
namespace gpumode::optim {

constexpr int kBlock = 128;

GPUMODE_HD int64_t block_exponents_offset(int64_t numel) { return (numel + 15) / 16 * 16; }

GPUMODE_HD int64_t blocks_nbytes(int64_t numel) {
  return block_exponents_offset(numel) + (numel + kBlock - 1) / kBlock;
}

// A magnitude of 4 bits of exponent and kMantissa of mantissa, without infinities; of a block, the
// exponent is at most kMost.
template <int kMantissa, uint32_t kMost>
struct Magnitude8 {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kSmallestNormal = 113;  // biased, of a block whose exponent is 127
  static constexpr uint32_t kFirst = (kSmallestNormal - 1) << 23;
  // Lower ones would make the distance between two codes a subnormal float.
  static constexpr uint32_t kLeastExponent = 32;
  static constexpr uint32_t kNotFinite = 255;

  // Of a block, from the bits of its largest magnitude, which is no more than the largest code.
  static GPUMODE_HD uint32_t exponent(uint32_t largest) {
    const uint32_t e = (largest + ((1u << kShift) - 1u)) >> 23;
    return e > kMost ? kNotFinite : (e < kLeastExponent ? kLeastExponent : e);
  }
  // What codes are multiplied by, and magnitudes before they become codes.
  static GPUMODE_HD float scale(uint32_t exponent) {
    return float_of(exponent == kNotFinite ? 0x7fc00000u : exponent << 23);
  }
  static GPUMODE_HD float inverse_scale(uint32_t exponent) {
    return float_of(exponent == kNotFinite ? 0u : (254u - exponent) << 23);
  }

  static GPUMODE_HD float widen(uint32_t code, float scale) {
    const uint32_t u = (code << kShift) + kFirst;
    const float normal = float_of(u);
    // One binade up, where the steps are as wide, without the first value.
    const float subnormal = float_of(u + (1u << 23)) - float_of(kSmallestNormal << 23);
    return float_of(select(code >> kMantissa == 0, bits_of(subnormal), bits_of(normal))) * scale;
  }
  // Of a magnitude times inverse_scale, which is below 2.
  static GPUMODE_HD uint32_t narrow(float x, uint32_t random) {
    const uint32_t subnormal = bits_of(x + float_of(kSmallestNormal << 23)) - (1u << 23);
    const uint32_t u = select(bits_of(x) < kSmallestNormal << 23, subnormal, bits_of(x));
    return ((u + (random & ((1u << kShift) - 1u))) >> kShift) - (kFirst >> kShift);
  }
};

// Of any sign.
struct Signed8 {
  using Magnitude = Magnitude8<3, 253>;  // below 1.6e38
  static GPUMODE_HD float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
  static GPUMODE_HD float widen(uint8_t code, float scale) {
    const float x = Magnitude::widen(code & 0x7fu, scale);
    return float_of(bits_of(x) | (code & 0x80u) << 24);
  }
  static GPUMODE_HD uint8_t narrow(float x, float inverse_scale, uint32_t random) {
    const uint32_t code = Magnitude::narrow(magnitude(x) * inverse_scale, random);
    return static_cast<uint8_t>(
        select(inverse_scale == 0.0f, 0u, code | (bits_of(x) >> 24 & 0x80u)));
  }
};

// Squares, or averages of them: the root is kept. One that is not zero never becomes zero, since
// steps are divided by it.
struct Square8 {
  using Magnitude = Magnitude8<4, 190>;  // whose square is a float: below 3.2e38
  static GPUMODE_HD float magnitude(float x) { return root(x); }
  static GPUMODE_HD float widen(uint8_t code, float scale) {
    const float x = Magnitude::widen(code, scale);
    return x * x;
  }
  static GPUMODE_HD uint8_t narrow(float x, float inverse_scale, uint32_t random) {
    const uint32_t code = Magnitude::narrow(root(x) * inverse_scale, random);
    const uint32_t least = static_cast<uint32_t>(x > 0.0f);
    return static_cast<uint8_t>(
        select(inverse_scale == 0.0f, 0u, select(code < least, least, code)));
  }
};

}  // namespace gpumode::optim
