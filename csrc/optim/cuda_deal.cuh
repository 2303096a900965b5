#pragma once

#include <cuda_runtime.h>

#include "optim/cuda_pass.h"
#include "optim/cuda_pipeline.cuh"
#include "optim/update.h"

// Deals tiles out to blocks, and looks ahead at what is to be known of them. While all memory's
// bandwidth is used, whatever is read waits behind all that is on its way already, for several
// microseconds; and what is to be known of a tile is three such reads, each of which needs the one
// before: its row's number, the row, its step. So a hand of several units is dealt at a time, and
// while one is worked on, these reads are under way for the next three.
namespace gpumode::optim {

constexpr uint32_t kMaxHand = 2;  // units
// The one that is worked on, and those for which the three reads are under way.
constexpr uint32_t kNumHands = 4;
constexpr uint32_t kNone = ~0u;

// What is known of the first tile of a unit.
struct Entry {
  alignas(16) Row row;
  alignas(16) double hyper[kMaxHyper];
  alignas(16) double sums[kMaxSums];
  const void* grad;
  float step, scalar;
  uint32_t number;  // of the row; kNone: nobody has looked, since it was a known one
};

// How many tiles a unit has.
template <class Update>
__device__ uint32_t tiles_of_unit(const Launch& launch) {
  return Update::kNumSums > 0 ? launch.tiles_of_sum : 1;
}

// Used by one warp.
template <class Update>
class Deal {
 public:
  struct Memory {
    Entry entries[kNumHands][kMaxHand], extra;
  };

  __device__ Deal(const Launch& launch, Memory* memory)
      : launch_(launch),
        memory_(*memory),
        num_units_((launch.num_tiles + tiles_of_unit<Update>(launch) - 1) /
                   tiles_of_unit<Update>(launch)),
        num_rounds_((num_units_ + gridDim.x * launch.hand - 1) / (gridDim.x * launch.hand)) {
    for (uint32_t& hand : hands_) hand = num_hands();
    for (uint32_t i = 0; i < kNumHands; ++i) next(0, 0);
  }

  // Whether there is a hand; then it has launch.hand units, the last of which may have no tiles.
  __device__ bool has_hand() const { return hands_[0] < num_hands(); }
  __device__ uint32_t first_tile(uint32_t i) const {
    return min(unit_of(hands_[0], i) * tiles_of_unit<Update>(launch_), launch_.num_tiles);
  }
  __device__ uint32_t last_tile(uint32_t i) const {
    return min(first_tile(i) + tiles_of_unit<Update>(launch_), launch_.num_tiles);
  }
  __device__ const Entry& entry(uint32_t i) const { return memory_.entries[slot_ % kNumHands][i]; }

  // What begins with a tile from `known` to `end_of_known` need not be looked at.
  __device__ void next(uint32_t known, uint32_t end_of_known) {
    wait_for_copies();
    for (uint32_t i = 0; i + 1 < kNumHands; ++i) hands_[i] = hands_[i + 1];
    hands_[3] = __shfl_sync(~0u, taken_, 0);
    if (hands_[3] < num_hands()) taken_ = take();
    ++slot_;
    if (is_there(3, lane())) {
      const uint32_t tile = unit_of(hands_[3], lane()) * tiles_of_unit<Update>(launch_);
      uint32_t* number = &at(3, lane())->number;
      if (known <= tile && tile < end_of_known) {
        *number = kNone;
      } else {
        copy_async<4>(number, &launch_.row_of_tiles[tile]);
      }
    }
    const uint32_t i = lane() / kLanesOfUnit;  // kMaxHand and more are not there
    if (is_there(2, i) && at(2, i)->number != kNone) copy_row(at(2, i), lane() % kLanesOfUnit);
    if (is_there(1, i) && at(1, i)->number != kNone) copy_state(at(1, i), lane() % kLanesOfUnit);
    commit_copies();
  }

  // Of any other tile's row; waits for it.
  __device__ const Entry& look_up(uint32_t tile) {
    Entry* entry = &memory_.extra;
    entry->number = launch_.row_of_tiles[tile];
    if (lane() < kLanesOfUnit) copy_row(entry, lane());
    commit_copies();
    wait_for_copies();
    if (lane() < kLanesOfUnit) copy_state(entry, lane());
    commit_copies();
    wait_for_copies();
    return *entry;
  }

 private:
  static constexpr uint32_t kLanesOfUnit = 8;
  static_assert(kLanesOfUnit * kMaxHand <= kLanes);

  static __device__ uint32_t lane() { return threadIdx.x % kLanes; }

  __device__ uint32_t num_hands() const { return num_rounds_ * gridDim.x; }

  // The units of a hand lie apart, and those that blocks have at a time side by side, which memory
  // is fast at.
  __device__ uint32_t unit_of(uint32_t hand, uint32_t i) const {
    const uint32_t round = hand / gridDim.x;
    return hand + (round * (launch_.hand - 1) + i) * gridDim.x;
  }
  __device__ bool is_there(uint32_t ahead, uint32_t i) const {
    return hands_[ahead] < num_hands() && i < launch_.hand &&
           unit_of(hands_[ahead], i) < num_units_;
  }
  __device__ Entry* at(uint32_t ahead, uint32_t i) {
    return &memory_.entries[(slot_ + ahead) % kNumHands][i];
  }

  // Each block takes until nothing is left, which makes as many calls as there are hands: the
  // counter is 0 again. What is taken is not looked at before the next hand. Where there are sums,
  // the order is fixed, so that they do not depend on chance.
  __device__ uint32_t take() {
    if (num_rounds_ == 1) return num_hands();
    if (Update::kNumSums > 0) return hands_[3] + gridDim.x;
    if (lane() != 0) return 0;
    return gridDim.x + atomicInc(&launch_.tickets[launch_.num_rows + 1], num_hands() - 1);
  }

  // Each of kLanesOfUnit lanes copies one part.
  __device__ void copy_row(Entry* entry, uint32_t part) {
    static_assert(sizeof(Row) == (kLanesOfUnit - 1) * 16);
    if (part == kLanesOfUnit - 1) {
      copy_async<8>(&entry->grad, &launch_.grads[entry->number]);
    } else {
      copy_async<16>(reinterpret_cast<uint4*>(&entry->row) + part,
                     reinterpret_cast<const uint4*>(&launch_.rows[entry->number]) + part);
    }
  }

  __device__ void copy_state(Entry* entry, uint32_t part) {
    static_assert(kMaxHyper == 2 * (kLanesOfUnit - 3) && kMaxSums == 2);
    const Row& row = entry->row;
    if (part < kMaxHyper / 2) {
      if (launch_.hyper == nullptr) return;
      copy_async<16>(entry->hyper + 2 * part, launch_.hyper + row.group * kMaxHyper + 2 * part);
    } else if (part == kMaxHyper / 2) {
      entry->step = 0.0f;
      if (row.step != nullptr) copy_async<4>(&entry->step, row.step);
    } else if (part == kMaxHyper / 2 + 1) {
      entry->scalar = 0.0f;
      if (row.scalar != nullptr) copy_async<4>(&entry->scalar, row.scalar);
    } else if ((Update::kAccess & kIsOfItsTensor) != 0 && launch_.sums != nullptr) {
      copy_async<16>(entry->sums, launch_.sums + static_cast<int64_t>(row.index) * kMaxSums);
    }
  }

  const Launch& launch_;
  Memory& memory_;
  const uint32_t num_units_, num_rounds_;
  uint32_t hands_[kNumHands];
  uint32_t taken_ = blockIdx.x;  // what comes after them, in lane 0
  uint32_t slot_ = 0;
};

}  // namespace gpumode::optim
