#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/op.h"
#include "core/status.h"

namespace gpumode {

// What all members must agree on for one op: small enough to publish with every op, plain data so
// that it can live in shared memory. Of a coalesced op the first differing fields are not named
// one by one: `rest` folds all of its parts into one hash.
struct Signature {
  uint8_t collective = 0;
  uint8_t dtype = 0;
  uint8_t reduce_op = 0;
  uint8_t permuted = 0;
  int32_t root = 0;
  uint32_t num_parts = 0;
  uint32_t commits = 0;
  uint64_t numel = 0;  // of the first part; 0 where ranks may differ (uneven gathers)
  uint64_t rest = 0;   // hash over all parts, the factor included

  static Signature of(const std::vector<OpDesc>& parts);
  bool operator==(const Signature& o) const;
  bool operator!=(const Signature& o) const { return !(*this == o); }
  // "all_reduce(sum, float32, 1024 elements)", for error messages.
  std::string str() const;
};

static_assert(sizeof(Signature) == 32, "published in shared memory");

class Channel;

// Compares what the members announced for op `seq` with what this rank announced.
struct Agreement {
  bool complete = false;     // every member has entered the op
  Status status;             // Mismatch, naming both sides, as soon as one member differs
  std::vector<int> missing;  // members that have not entered yet
};
Agreement check_agreement(const Channel& channel, uint64_t seq, const Signature& mine);

// Mismatch, naming both sides.
Status mismatch(int my_rank, const Signature& mine, int their_rank, const Signature& theirs,
                uint64_t seq);

}  // namespace gpumode
