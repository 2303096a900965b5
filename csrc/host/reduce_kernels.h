#pragma once

#include <cstddef>

#include "core/op.h"

namespace gpumode::host {

struct Reduction {
  ReduceOp op = ReduceOp::Sum;
  DType dtype = DType::F32;
  double factor = 1.0;  // PreMulSum
};

// dst[i] = sources[0][i] (op) sources[1][i] (op) ... in this order, so that everybody who reduces
// the same sources gets the same bits. `also`, if not null, receives a second copy. dst may be one
// of the sources. `nbytes` is the length of each buffer.
//
// f16 and bf16 accumulate in f32 and are rounded once. AVG divides by num_sources at the end.
// Integers wrap. MIN and MAX give NaN where any source is NaN. Of bool, SUM and MAX are "or",
// PRODUCT and MIN are "and".
void reduce(const Reduction& reduction, const std::byte* const* sources, int num_sources,
            size_t nbytes, std::byte* dst, std::byte* also);

}  // namespace gpumode::host
