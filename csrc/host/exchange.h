#pragma once

#include <optional>
#include <vector>

#include "host/reduce_kernels.h"
#include "host/task.h"

namespace gpumode::host {

// What one rank publishes and reads in a collective of one phase: each rank has some bytes for each
// other rank, and reads what the others have for it, to keep or to reduce. All collectives are of
// this form, except that a large reduction to everybody takes two phases (two_phase.h).
struct ExchangePlan {
  explicit ExchangePlan(int size) : out(static_cast<size_t>(size)), in(static_cast<size_t>(size)) {}

  // What each rank may read from us. If `common`, these are the same bytes for all whose length is
  // not 0, and are published once.
  std::vector<Buffer> out;
  bool common = false;
  // Whether the signature leaves the sizes open, so that the members must compare them.
  bool uneven = false;
  // Where each rank's bytes go, and how many they must be. Ours may be `out` of ourselves, and are
  // copied if they are not the same memory.
  std::vector<Buffer> in;
  // If set, `in` only says how many bytes to read, and their reduction in rank order, with
  // out[rank] for our part, goes to `result`.
  std::optional<Reduction> reduction;
  std::byte* result = nullptr;
};

class Exchange : public Task {
 public:
  Exchange(const Context& context, ExchangePlan plan);

  bool step() override;

 private:
  std::vector<int> waits_of(int rank) const override;
  void enter();
  void start_reading();
  bool publish_round();
  bool read_rounds();
  bool reduce_round();
  void read_direct(int publisher);
  void reduce_direct();
  void copy_own();
  bool slot_free_of(int reader) const;
  bool slot_free() const;
  // How many rounds of this op `publisher` has published so far, how many of them hold something
  // for `reader`, and how many it is done with.
  uint64_t rounds_of(int publisher) const;
  uint64_t rounds_for(int reader, int publisher) const;
  uint64_t rounds_read(int reader, int publisher) const;
  bool reading_done() const;
  size_t piece_bytes() const;
  // Where rank `reader` finds its piece within a slot of a publisher.
  size_t piece_offset(int publisher, int reader) const;
  size_t payload_offset(int publisher, int reader) const;

  Rounds& rounds_;
  const uint64_t step_;
  ExchangePlan plan_;
  uint64_t rounds_to_publish_ = 0, published_ = 0;
  std::vector<uint64_t> to_read_, read_;  // rounds, per publisher
  bool reading_ = false;
};

}  // namespace gpumode::host
