#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "gpu/status.h"
#include "optim/cuda_consumer.cuh"
#include "optim/cuda_producer.cuh"

// The kernel of a pass. A block stays, and takes one tile after the other. One of its warps, the
// producer, looks up what the next tiles are, makes their updates out of hyper-parameters and step,
// and has their operands loaded into a ring of stages in shared memory; the others, the consumers,
// compute, and store to global memory.
//
// Tiles are dealt out in order of their addresses, to who is free: then what all blocks read and
// write at a time lies close together, which memory is fast at. Only a pass that sums has a fixed
// order, so that its sums do not depend on chance.
namespace gpumode::optim {

// Of a block, so that all are done at nearly the same time.
constexpr uint32_t kEnoughHands = 8;

// Of one multiprocessor: as many as have registers enough to spill none, which would cost more.
constexpr int num_blocks(Kind kind) { return kind == Kind::Float ? 3 : 2; }

template <Kind kKind, template <class> class Update>
__global__ void __launch_bounds__(kThreads, num_blocks(kKind))
    update_kernel(const __grid_constant__ Launch launch, uint32_t num_stages) {
  using T = std::conditional_t<kKind == Kind::Double, double, float>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Shared<Update<T>> shared;
  __shared__ SharedSumsOf<Update<T>> sums;
  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return;
  if (threadIdx.x < num_stages) {
    shared.full[threadIdx.x].init(kLoadArrivals);
    shared.empty[threadIdx.x].init(kConsumerWarps);
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    consume<T, Update<T>>(launch, &shared, &sums, memory, num_stages);
  } else {
    Producer<T, Update<T>>(launch, &shared, memory, num_stages).run();
  }
}

template <template <class> class Update>
Status launch(const Launch& launch, void* stream) {
  if (launch.num_rows == 0) return {};
  constexpr decltype(&update_kernel<Kind::Float, Update>) kKernels[kNumKinds] = {
      update_kernel<Kind::Float, Update>, update_kernel<Kind::Double, Update>};
  constexpr char kWhat[] = "an optimizer's kernel";
  const auto kernel = kKernels[static_cast<int>(launch.kind)];
  const auto blocks = static_cast<uint32_t>(num_blocks(launch.kind));
  int device, num_processors, shared_bytes, reserved_bytes;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int* answer, cudaDeviceAttr what) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(answer, what, device);
  };
  ask(&num_processors, cudaDevAttrMultiProcessorCount);
  ask(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(&reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock);
  if (error != cudaSuccess) return from_cuda(kWhat, error);
  const auto fixed_bytes =
      static_cast<int>(sizeof(Shared<Update<double>>) + sizeof(SharedSumsOf<Update<double>>));
  const int of_a_block = shared_bytes / static_cast<int>(blocks) - reserved_bytes - fixed_bytes;
  const uint32_t num_stages = std::clamp(
      static_cast<uint32_t>(std::max(of_a_block, 0)) / launch.stage_bytes, 2u, kMaxStages);
  const uint32_t stages_bytes = num_stages * launch.stage_bytes;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(stages_bytes));
  if (error != cudaSuccess) return from_cuda(kWhat, error);
  const uint32_t tiles_of_unit = Update<float>::kNumSums > 0 ? launch.tiles_of_sum : 1;
  const uint32_t num_units = (launch.num_tiles + tiles_of_unit - 1) / tiles_of_unit;
  const uint32_t wanted = std::min(kMaxBlocks, blocks * static_cast<uint32_t>(num_processors));
  const uint32_t grid = std::min(num_units, wanted);
  Launch dealt = launch;
  dealt.hand = std::clamp(num_units / (grid * kEnoughHands), 1u, kMaxHand);
  kernel<<<grid, kThreads, stages_bytes, static_cast<cudaStream_t>(stream)>>>(dealt, num_stages);
  return from_cuda(kWhat, cudaGetLastError());
}

}  // namespace gpumode::optim
