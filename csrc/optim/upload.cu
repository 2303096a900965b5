#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "gpu/status.h"
#include "optim/cuda_pass.h"

namespace gpumode::optim {
namespace {

constexpr int kWords = 960;  // what all devices take as parameters of a kernel: 4 KiB in all

struct Words {
  uint32_t words[kWords];
};

__global__ void copy_words(uint32_t* to, const __grid_constant__ Words from, int num_words) {
  for (int i = static_cast<int>(threadIdx.x); i < num_words; i += blockDim.x) to[i] = from.words[i];
}

constexpr char kWhat[] = "a copy of parameters";

}  // namespace

Status copy_by_value(void* device, const void* host, int64_t nbytes, void* stream) {
  Words words{};
  for (int64_t at = 0; at < nbytes; at += sizeof(words)) {
    const int64_t part = std::min<int64_t>(nbytes - at, sizeof(words));
    std::memcpy(&words, static_cast<const char*>(host) + at, static_cast<size_t>(part));
    copy_words<<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<uint32_t*>(static_cast<char*>(device) + at), words,
        static_cast<int>(part / 4));
  }
  return from_cuda(kWhat, cudaGetLastError());
}

Status copy_outside_capture(void* device, const void* host, int64_t nbytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return from_cuda(kWhat, error);
  cudaStream_t stream = nullptr;
  error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error =
        cudaMemcpyAsync(device, host, static_cast<size_t>(nbytes), cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  return from_cuda(kWhat, error);
}

}  // namespace gpumode::optim
