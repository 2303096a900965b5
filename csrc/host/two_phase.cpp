#include "host/two_phase.h"

#include <algorithm>
#include <cstring>

namespace gpumode::host {
namespace {

// Measured with 2, 4 and 8 ranks on 16 processors: above it, reading everybody's input, line by
// line from the other processors' caches, takes longer than the second phase.
constexpr size_t kDirectReadBytes = size_t{16} << 10;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

bool TwoPhase::pays(const Epoch& epoch, size_t nbytes) {
  if (epoch.size() == 1) return false;
  if (nbytes > kDirectBytes) return true;
  // Two more rounds of waiting against reading less.
  return nbytes * static_cast<size_t>(epoch.size() - 1) > kDirectReadBytes;
}

TwoPhase::TwoPhase(const Context& context, const Reduction& reduction, const Buffer& input,
                   const Buffer& output, int root)
    : Task(context),
      rounds_(context.rounds),
      reduction_(reduction),
      input_(static_cast<const std::byte*>(input.data)),
      output_(static_cast<std::byte*>(output.data)),
      nbytes_(output.nbytes),
      root_(root),
      collected_(static_cast<size_t>(epoch_.size())),
      sources_(static_cast<size_t>(epoch_.size())) {
  const auto size = static_cast<size_t>(epoch_.size());
  shard_bytes_ = round_up((nbytes_ + size - 1) / size, kCacheLine);
  piece_bytes_ = std::min(kSlotBytes / (size - 1) / kCacheLine * kCacheLine, shard_bytes_);
  num_rounds_ = (shard_bytes_ + piece_bytes_ - 1) / piece_bytes_;
}

bool TwoPhase::step() {
  if (!meeting_.entered()) meeting_.enter(false, num_rounds_, num_rounds_);
  if (!meeting_.complete()) {
    const bool moved = meeting_.look();
    if (!meeting_.status().ok()) {
      finish(meeting_.status());
      return true;
    }
    if (!meeting_.complete()) return moved;
  }
  // What others wait for comes first.
  bool moved = reduce_own();
  moved |= contribute();
  moved |= collect();
  if (contributed_ == num_rounds_ && reduced_ == num_rounds_ &&
      std::all_of(collected_.begin(), collected_.end(),
                  [this](uint64_t n) { return n == num_rounds_; })) {
    meeting_.leave(&rounds_);
    finish({});
    return true;
  }
  return moved;
}

TwoPhase::Piece TwoPhase::piece(int owner, uint64_t round) const {
  const size_t shard_end = std::min(nbytes_, (static_cast<size_t>(owner) + 1) * shard_bytes_);
  const size_t begin =
      std::min(shard_end, static_cast<size_t>(owner) * shard_bytes_ + round * piece_bytes_);
  return {begin, std::min(piece_bytes_, shard_end - begin)};
}

size_t TwoPhase::contribution_offset(int publisher, int owner) const {
  return static_cast<size_t>(owner < publisher ? owner : owner - 1) * piece_bytes_;
}

uint64_t TwoPhase::rounds_of(int publisher, Ring ring) const {
  return epoch_.of(publisher).header().published[ring].load(std::memory_order_acquire) -
         base(publisher, ring);
}

uint64_t TwoPhase::rounds_read(int reader, int publisher, Ring ring) const {
  return epoch_.of(reader).consumed(publisher).rounds[ring].load(std::memory_order_acquire) -
         base(publisher, ring);
}

bool TwoPhase::has_published(int rank, Ring ring, uint64_t round) const {
  return rounds_of(rank, ring) > round;
}

// Whether `reader` is done with the round that was in the slot of `round` before.
bool TwoPhase::has_consumed(int reader, int publisher, Ring ring, uint64_t round) const {
  return rounds_read(reader, publisher, ring) + kSlots > round;
}

bool TwoPhase::slot_free(Ring ring, uint64_t round) const {
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q != epoch_.rank() && !has_consumed(q, epoch_.rank(), ring, round)) return false;
  }
  return true;
}

void TwoPhase::publish(Ring ring, uint64_t round) {
  epoch_.mine().header().published[ring].store(base(epoch_.rank(), ring) + round + 1,
                                               std::memory_order_release);
}

void TwoPhase::consume(int publisher, Ring ring, uint64_t round) {
  epoch_.mine().consumed(publisher).rounds[ring].store(base(publisher, ring) + round + 1,
                                                       std::memory_order_release);
}

// First phase, as a contributor: hands each owner its piece of this round.
bool TwoPhase::contribute() {
  const int me = epoch_.rank();
  if (contributed_ == num_rounds_ || !slot_free(kContributions, contributed_)) return false;
  std::byte* slot = epoch_.mine().slot(kContributions, base(me, kContributions) + contributed_);
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == me) continue;
    const Piece p = piece(q, contributed_);
    std::memcpy(slot + contribution_offset(me, q), input_ + p.offset, p.nbytes);
  }
  publish(kContributions, contributed_++);
  epoch_.changed();
  return true;
}

// First phase, as an owner: reduces one piece and publishes the result.
bool TwoPhase::reduce_own() {
  const int me = epoch_.rank();
  const uint64_t round = reduced_;
  if (round == num_rounds_ || !slot_free(kResults, round)) return false;
  const Piece p = piece(me, round);
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == me) {
      sources_[q] = input_ + p.offset;
      continue;
    }
    if (!has_published(q, kContributions, round)) return false;
    sources_[q] = epoch_.of(q).slot(kContributions, base(q, kContributions) + round) +
                  contribution_offset(q, me);
  }
  std::byte* slot = epoch_.mine().slot(kResults, base(me, kResults) + round);
  if (root_ == kEverybody) {
    reduce(reduction_, sources_.data(), epoch_.size(), p.nbytes, output_ + p.offset, slot);
  } else {
    std::byte* dst = root_ == me ? output_ + p.offset : slot;
    reduce(reduction_, sources_.data(), epoch_.size(), p.nbytes, dst, nullptr);
  }
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q != me) consume(q, kContributions, round);
  }
  publish(kResults, reduced_++);
  epoch_.changed();
  return true;
}

// Second phase: copies what owners have published.
bool TwoPhase::collect() {
  bool moved = false;
  for (int q = 0; q < epoch_.size(); ++q) {
    const uint64_t round = collected_[q];
    if (round == num_rounds_) continue;
    if (q == epoch_.rank()) {
      collected_[q] = num_rounds_;
      continue;
    }
    // Our contribution to the piece must have left the buffer before its result may enter it; the
    // owner cannot have reduced it otherwise.
    if (!has_published(q, kResults, round)) continue;
    if (receives()) {
      const Piece p = piece(q, round);
      std::memcpy(output_ + p.offset, epoch_.of(q).slot(kResults, base(q, kResults) + round),
                  p.nbytes);
    }
    consume(q, kResults, round);
    ++collected_[q];
    moved = true;
  }
  if (moved) epoch_.changed();
  return moved;
}

std::vector<int> TwoPhase::waits_of(int rank) const {
  const uint64_t contributed = rounds_of(rank, kContributions);
  const uint64_t reduced = rounds_of(rank, kResults);
  bool can_contribute = contributed < num_rounds_, can_reduce = reduced < num_rounds_;
  bool can_collect = false;
  std::vector<int> ranks;
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == rank) continue;
    const uint64_t collected = rounds_read(rank, q, kResults);
    const bool contribution = reduced < num_rounds_ && !has_published(q, kContributions, reduced);
    const bool contribution_slot =
        contributed < num_rounds_ && !has_consumed(q, rank, kContributions, contributed);
    const bool result_slot = reduced < num_rounds_ && !has_consumed(q, rank, kResults, reduced);
    const bool result = collected < num_rounds_ && !has_published(q, kResults, collected);
    can_contribute = can_contribute && !contribution_slot;
    can_reduce = can_reduce && !contribution && !result_slot;
    can_collect = can_collect || (collected < num_rounds_ && !result);
    if (contribution || contribution_slot || result_slot || result) ranks.push_back(q);
  }
  return can_contribute || can_reduce || can_collect ? std::vector<int>() : ranks;
}

}  // namespace gpumode::host
