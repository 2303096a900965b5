#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/status.h"

namespace gpumode {

// `what` was done, by CUDA's runtime.
inline Status from_cuda(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {Code::Internal, std::string(what) + ": " + cudaGetErrorString(error)};
}

}  // namespace gpumode
