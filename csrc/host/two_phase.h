#pragma once

#include <vector>

#include "host/reduce_kernels.h"
#include "host/task.h"

namespace gpumode::host {

// A large reduction, to everybody or to one root: every rank owns a shard. It reduces its shard
// from everybody's contributions (first phase: reduce-scatter), and publishes the result, which the
// others copy (second phase: all-gather; only the root copies for a reduction to one). Both phases
// are pipelined round by round. For N bytes on n ranks each rank reads and writes, besides its own
// buffer, 2 (n-1)/n N bytes of shared memory in each phase, the least that staging allows.
//
// Each element is reduced once, by its owner, in rank order: all ranks get the same bits.
class TwoPhase : public Task {
 public:
  static constexpr int kEverybody = -1;

  // Whether it is faster than an exchange in which everybody reads everything; the same answer on
  // all members.
  static bool pays(const Epoch& epoch, size_t nbytes);

  // `input` and `output` are the same memory, or do not overlap.
  TwoPhase(const Context& context, const Reduction& reduction, const Buffer& input,
           const Buffer& output, int root = kEverybody);

  bool step() override;

 private:
  std::vector<int> waits_of(int rank) const override;
  struct Piece {
    size_t offset, nbytes;  // within the buffer
  };
  Piece piece(int owner, uint64_t round) const;
  size_t contribution_offset(int publisher, int owner) const;
  bool receives() const { return root_ == kEverybody || root_ == epoch_.rank(); }
  uint64_t base(int rank, Ring ring) const { return rounds_.published[rank].ring[ring]; }
  // How many rounds of this op `publisher` has published so far, and how many `reader` is done
  // with.
  uint64_t rounds_of(int publisher, Ring ring) const;
  uint64_t rounds_read(int reader, int publisher, Ring ring) const;
  bool has_published(int rank, Ring ring, uint64_t round) const;
  bool has_consumed(int reader, int publisher, Ring ring, uint64_t round) const;
  bool slot_free(Ring ring, uint64_t round) const;
  void publish(Ring ring, uint64_t round);
  void consume(int publisher, Ring ring, uint64_t round);

  bool contribute();
  bool reduce_own();
  bool collect();

  Rounds& rounds_;
  const Reduction reduction_;
  const std::byte* const input_;
  std::byte* const output_;
  const size_t nbytes_;
  const int root_;
  size_t piece_bytes_, shard_bytes_;
  uint64_t num_rounds_;
  uint64_t contributed_ = 0, reduced_ = 0;
  std::vector<uint64_t> collected_;  // per owner
  std::vector<const std::byte*> sources_;
};

}  // namespace gpumode::host
