#pragma once

#include <type_traits>

#include "optim/cuda_stage.cuh"

// How the consumers add up what an update sums over each tensor, and over all of them.
namespace gpumode::optim {

// The tiles that a block has of a tensor, and their sums.
template <int kSums>
struct Part {
  uint32_t number, tile, num_tiles;
  double sums[kSums][kConsumerWarps];
};

// How many parts a block collects before it has them counted.
constexpr int kMaxParts = 128;

// For an update with sums, beside the stages.
template <class Update>
struct SharedSums {
  Part<Update::kNumSums> parts[kMaxParts];
  // Of how many tensors no part is missing any more; and of which of them there are several.
  uint32_t num_complete, num_parted, parted[kMaxParts];
  double of_warps[kConsumerWarps];
  bool is_last;
};

// The consumers wait for each other.
__device__ inline void meet_consumers() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The sum over a warp, always in the same order. In lane 0.
__device__ inline double sum_over_warp(double value) {
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_down_sync(~0u, value, lanes);
  }
  return value;
}

__device__ inline double sum_of(const double (&of_warps)[kConsumerWarps]) {
  double sum = 0.0;
  for (double each : of_warps) sum += each;
  return sum;
}

// What a block has of the sums over tensors. A tensor is complete when all blocks have counted what
// they have of it. To count takes microseconds, and so is done for many tensors at once, one by
// each thread.
template <class Update>
class Adder {
 public:
  __device__ Adder(const Launch& launch, SharedSums<Update>* shared)
      : launch_(launch), shared_(*shared) {
    if (threadIdx.x == 0) shared_.num_complete = shared_.num_parted = 0;
  }

  // Called by all consumers, before a stage is added to `values`.
  __device__ void begin(const Stage<Update>& stage) {
    if (launch_.sums == nullptr) return;
    if (stage.tensor.number != number_) {
      end_part();
      number_ = stage.tensor.number;
      tile_ = stage.tile;
      num_tiles_ = 0;
    }
    num_tiles_ += stage.num_tiles;
  }

  // Once there are no more.
  __device__ void end() {
    if (launch_.sums == nullptr) return end_block();
    end_part();
    count();
  }

  double values[Update::kNumSums] = {};

 private:
  static constexpr int kSums = Update::kNumSums;

  static __device__ uint32_t lane() { return threadIdx.x % kLanes; }

  __device__ void end_part() {
    if (number_ == kNone) return;
    Part<kSums>& part = shared_.parts[num_parts_];
    for (int k = 0; k < kSums; ++k) {
      const double sum = sum_over_warp(values[k]);
      if (lane() == 0) part.sums[k][threadIdx.x / kLanes] = sum;
      values[k] = 0.0;
    }
    if (threadIdx.x == 0) {
      part.number = number_;
      part.tile = tile_;
      part.num_tiles = num_tiles_;
    }
    if (++num_parts_ == kMaxParts) count();
  }

  __device__ void count() {
    meet_consumers();
    if (threadIdx.x < num_parts_) count_part(shared_.parts[threadIdx.x]);
    num_parts_ = 0;
    meet_consumers();
    for (uint32_t i = threadIdx.x / kLanes; i < shared_.num_parted; i += kConsumerWarps) {
      add_parts(launch_.rows[shared_.parted[i]]);
    }
    meet_consumers();
    if (threadIdx.x == 0) {
      shared_.is_last =
          launch_.total != nullptr && shared_.num_complete > 0 &&
          takes_last(&launch_.tickets[launch_.num_rows], shared_.num_complete, launch_.num_rows);
      shared_.num_complete = shared_.num_parted = 0;
    }
    meet_consumers();
    if (shared_.is_last) {
      add_total(launch_.num_rows, [&](uint32_t i) {
        return &launch_.sums[static_cast<int64_t>(launch_.rows[i].index) * kMaxSums];
      });
    }
  }

  // Where only the total is wanted, which so is added up in two steps.
  __device__ void end_block() {
    const double sum = sum_over_block(values[0]);
    if (threadIdx.x == 0) {
      launch_.partial_sums[blockIdx.x] = sum;
      shared_.is_last = takes_last(&launch_.tickets[launch_.num_rows], 1, gridDim.x);
    }
    meet_consumers();
    if (shared_.is_last) {
      add_total(gridDim.x, [&](uint32_t i) { return &launch_.partial_sums[i]; });
    }
  }

  // In thread 0.
  __device__ double sum_over_block(double value) {
    value = sum_over_warp(value);
    if (lane() == 0) shared_.of_warps[threadIdx.x / kLanes] = value;
    meet_consumers();
    return sum_of(shared_.of_warps);
  }

  __device__ double* partial_sums(const Row& row) {
    return launch_.partial_sums + static_cast<int64_t>(row.first_sum) * kMaxSums;
  }

  __device__ uint32_t unit_of(uint32_t tile) const { return tile / launch_.tiles_of_sum; }

  __device__ void count_part(const Part<kSums>& part) {
    const Row& row = launch_.rows[part.number];
    const bool is_whole = part.num_tiles == row.num_tiles;
    double* to =
        is_whole ? launch_.sums + static_cast<int64_t>(row.index) * kMaxSums
                 : partial_sums(row) + (unit_of(part.tile) - unit_of(row.first_tile)) * kMaxSums;
    for (int k = 0; k < kSums; ++k) to[k] = sum_of(part.sums[k]);
    if (!takes_last(&launch_.tickets[part.number], part.num_tiles, row.num_tiles)) return;
    atomicAdd(&shared_.num_complete, 1);
    if (!is_whole) shared_.parted[atomicAdd(&shared_.num_parted, 1)] = part.number;
  }

  // By a warp. Each block that has any of a tensor's units has one of the first.
  __device__ void add_parts(const Row& row) {
    const uint32_t num_units =
        unit_of(row.first_tile + row.num_tiles - 1) - unit_of(row.first_tile) + 1;
    const uint32_t num_sums = min(num_units, gridDim.x);
    for (int k = 0; k < kSums; ++k) {
      double sum = 0.0;
#pragma unroll 8
      for (uint32_t i = lane(); i < num_sums; i += kLanes) {
        sum += __ldcg(&partial_sums(row)[i * kMaxSums + k]);
      }
      sum = sum_over_warp(sum);
      if (lane() == 0) launch_.sums[static_cast<int64_t>(row.index) * kMaxSums + k] = sum;
    }
  }

  // Over all tensors, or all blocks.
  template <class At>
  __device__ void add_total(uint32_t num_sums, At at) {
    double sum = 0.0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < num_sums; i += kConsumers) sum += __ldcg(at(i));
    meet_consumers();  // of_warps is free again
    sum = sum_over_block(sum);
    if (threadIdx.x != 0) return;
    if (launch_.adds_to_total) sum += *launch_.total;
    *launch_.total = sum;
    *launch_.total_is_bad = isfinite(sum) ? 0.0f : 1.0f;
  }

  const Launch& launch_;
  SharedSums<Update>& shared_;
  uint32_t number_ = kNone, tile_ = 0, num_tiles_ = 0;  // of the part that `values` is of
  uint32_t num_parts_ = 0;
};

// Where there are none.
struct NoSums {};
struct NoAdder {
  __device__ NoAdder(const Launch& /*launch*/, NoSums* /*shared*/) {}
  double* values = nullptr;
};

template <class Update>
using SharedSumsOf = std::conditional_t<(Update::kNumSums > 0), SharedSums<Update>, NoSums>;

}  // namespace gpumode::optim
