#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// c10d's virtual tables and names change with torch's minor versions. Every difference that this
// folder knows is named here; where torch offers a feature macro, that is used instead.

#define GPUMODE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// 2.13 renamed NCCLPreMulSumSupplement.
#if GPUMODE_TORCH_AT_LEAST(2, 13)
#define GPUMODE_PREMUL_SUPPLEMENT ::c10d::PreMulSumSupplement
#else
#define GPUMODE_PREMUL_SUPPLEMENT ::c10d::NCCLPreMulSumSupplement
#endif

// 2.14 gave the single-tensor collectives new names and made a backend's rank and size mutable.
#if GPUMODE_TORCH_AT_LEAST(2, 14)
#define GPUMODE_C10D_HAS_SINGLE_NAMES 1
#define GPUMODE_C10D_MUTABLE_RANK 1
#endif
