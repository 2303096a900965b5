#include <algorithm>
#include <limits>

#include "host/task.h"

namespace gpumode::host {

Meeting::Meeting(const Context& context)
    : epoch_(context.epoch),
      id_(context.id),
      signature_(context.signature),
      met_(static_cast<size_t>(epoch_.size())),
      num_missing_(epoch_.size() - 1) {
  met_[epoch_.rank()] = true;
}

void Meeting::enter(bool direct, uint64_t contribution_rounds, uint64_t result_rounds) {
  Entry& entry = epoch_.mine().entry(id_.step);
  entry.signature = signature_;
  entry.direct = direct;
  entry.rounds[kContributions] = static_cast<uint32_t>(contribution_rounds);
  entry.rounds[kResults] = static_cast<uint32_t>(result_rounds);
  entry.entered_at = Clock::now().time_since_epoch().count();
  entry.step.store(id_.step, std::memory_order_seq_cst);
  entered_ = true;
  // Nobody can go on before the last member has entered, so only the last one wakes the others. Of
  // two that enter at once at least one sees both entries: the stores and the loads of `step` are
  // sequentially consistent.
  if (all_others_entered()) {
    epoch_.changed();
  } else {
    epoch_.changed_quietly();
  }
}

void Meeting::enter_uneven(bool direct, uint64_t rounds, const std::vector<Buffer>& sent,
                           const std::vector<Buffer>& expected) {
  uneven_ = true;
  const Segment& mine = epoch_.mine();
  uint64_t uniform = sent[0].nbytes;
  for (size_t q = 0; q < sent.size(); ++q) {
    mine.sent(id_.step)[q] = sent[q].nbytes;
    mine.expected(id_.step)[q] = expected[q].nbytes;
    if (sent[q].nbytes != uniform || expected[q].nbytes != uniform) uniform = kUneven;
  }
  mine.entry(id_.step).uniform_length = uniform;
  enter(direct, rounds, 0);
}

bool Meeting::all_others_entered() const {
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == epoch_.rank()) continue;
    if (epoch_.of(q).entry(id_.step).step.load(std::memory_order_seq_cst) != id_.step) return false;
  }
  return true;
}

bool Meeting::look() {
  bool moved = false;
  for (int q = 0; q < epoch_.size() && num_missing_ > 0; ++q) {
    if (met_[q]) continue;
    const Entry& entry = epoch_.of(q).entry(id_.step);
    if (entry.step.load(std::memory_order_acquire) != id_.step) continue;
    met_[q] = true;
    --num_missing_;
    moved = true;
    if (status_.ok() && entry.signature != signature_) {
      status_ = mismatch(epoch_.rank(), signature_, q, entry.signature, id_.seq);
    }
  }
  if (complete() && uneven_ && status_.ok()) status_ = check_sizes();
  return moved;
}

// Everybody checks all pairs, so that a difference between two members is an error on all.
Status Meeting::check_sizes() const {
  const int size = epoch_.size();
  const uint64_t uniform = epoch_.mine().entry(id_.step).uniform_length;
  bool even = uniform != kUneven;
  for (int q = 0; q < size && even; ++q) {
    even = epoch_.of(q).entry(id_.step).uniform_length == uniform;
  }
  for (int p = 0; p < size && !even; ++p) {
    for (int q = 0; q < size; ++q) {
      const uint64_t sent = epoch_.of(p).sent(id_.step)[q];
      const uint64_t expected = epoch_.of(q).expected(id_.step)[p];
      if (sent == expected) continue;
      return {Code::Mismatch,
              "op " + std::to_string(id_.seq) + " of the group, " + signature_.str() + ": rank " +
                  std::to_string(p) + " has " + std::to_string(sent) + " bytes for rank " +
                  std::to_string(q) + ", which expects " + std::to_string(expected),
              {p, q}};
    }
  }
  return {};
}

std::vector<int> Meeting::missing() const {
  std::vector<int> ranks;
  for (int q = 0; q < epoch_.size(); ++q) {
    if (!met_[q]) ranks.push_back(q);
  }
  return ranks;
}

Straggler Meeting::straggler() const {
  if (epoch_.size() == 1) return {};
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = std::numeric_limits<int64_t>::min();
  Straggler straggler;
  for (int q = 0; q < epoch_.size(); ++q) {
    if (!met_[q]) continue;
    const int64_t time = epoch_.of(q).entry(id_.step).entered_at;
    first = std::min(first, time);
    if (time > last) {
      last = time;
      straggler.rank = q;
    }
  }
  straggler.waited = Duration(last - first);
  return straggler;
}

void Meeting::leave(Rounds* rounds) {
  bool unread = false;
  for (int q = 0; q < epoch_.size(); ++q) {
    const Entry& entry = epoch_.of(q).entry(id_.step);
    for (int ring = 0; ring < kNumRings; ++ring) {
      uint64_t& total = rounds->published[q].ring[ring];
      total += entry.rounds[ring];
      if (q == epoch_.rank()) continue;
      std::atomic<uint64_t>& consumed = epoch_.mine().consumed(q).rounds[ring];
      if (consumed.load(std::memory_order_relaxed) == total) continue;
      consumed.store(total, std::memory_order_release);
      unread = true;
    }
  }
  if (unread) epoch_.changed();
}

}  // namespace gpumode::host
