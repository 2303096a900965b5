#pragma once

#include "optim/cuda_deal.cuh"
#include "optim/cuda_pass.h"
#include "optim/cuda_pipeline.cuh"
#include "optim/cuda_slow.cuh"

// What the producer hands to the consumers: cuda_pass.cuh says who they are.
namespace gpumode::optim {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * kLanes;
constexpr int kThreads = kConsumers + kLanes;
constexpr uint32_t kMaxStages = 3;
static_assert(kTileUnit % (kConsumers * kFloats) == 0);

// What the producer knows of the tensor that a tile is of.
template <class Update>
struct Tensor {
  Row row;
  alignas(8) unsigned char update[sizeof(Update)];
  const void* grad;
  uint32_t keys[1 + kMaxStates];   // of random bits: for the parameter, and for the states
  uint32_t offsets[kMaxOperands];  // of its operands in a stage
  uint32_t number;                 // of its row
};

template <class Update>
struct Stage {
  Tensor<Update> tensor;
  int64_t first;        // element
  uint32_t length;      // in elements, ...
  uint32_t num_loaded;  // ... of which so many were loaded ahead
  uint32_t tile, num_tiles;
  // Of its states in blocks: where the first exponent goes, and the key of all random bits.
  uint8_t* exponents[kMaxStates];
  uint32_t keys[kMaxStates];
  bool is_end;  // there are no more tiles
};

template <class Update>
struct Shared {
  Stage<Update> stages[kMaxStages];
  Barrier full[kMaxStages], empty[kMaxStages];
  typename Deal<Update>::Memory deal;
};

// Counts `mine` of `all`, and returns whether these were the last. What this thread has read and
// written before comes before what the last one reads and writes then.
__device__ inline bool takes_last(uint32_t* ticket, uint32_t mine, uint32_t all) {
  if (mine == all) return true;
  __threadfence();
  if (atomicAdd(ticket, mine) + mine != all) return false;
  *ticket = 0;
  __threadfence();
  return true;
}

}  // namespace gpumode::optim
