#include "host/exchange.h"

#include <algorithm>
#include <cstring>

namespace gpumode::host {
namespace {

uint64_t div_up(uint64_t n, uint64_t d) { return (n + d - 1) / d; }

std::byte* bytes(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data); }

}  // namespace

Exchange::Exchange(const Context& context, ExchangePlan plan)
    : Task(context),
      rounds_(context.rounds),
      step_(context.id.step),
      plan_(std::move(plan)),
      to_read_(static_cast<size_t>(epoch_.size())),
      read_(static_cast<size_t>(epoch_.size())) {}

bool Exchange::step() {
  if (!meeting_.entered()) enter();
  if (!reading_) {
    const bool moved = meeting_.look();
    if (!meeting_.status().ok()) {
      finish(meeting_.status());
      return true;
    }
    if (!meeting_.complete()) return moved;
    start_reading();
  }
  bool moved = plan_.reduction ? reduce_round() : read_rounds();
  moved |= publish_round();
  if (published_ == rounds_to_publish_ && reading_done()) {
    meeting_.leave(&rounds_);
    finish({});
    return true;
  }
  return moved;
}

// A slot holds one piece for all readers, or one for each.
size_t Exchange::piece_bytes() const {
  if (plan_.common || epoch_.size() <= 2) return kSlotBytes;
  return kSlotBytes / static_cast<size_t>(epoch_.size() - 1) / kCacheLine * kCacheLine;
}

size_t Exchange::piece_offset(int publisher, int reader) const {
  if (plan_.common) return 0;
  const int index = reader < publisher ? reader : reader - 1;
  return static_cast<size_t>(index) * piece_bytes();
}

// Where rank `reader` finds its bytes within the payload of a direct publisher.
size_t Exchange::payload_offset(int publisher, int reader) const {
  if (plan_.common) return 0;
  size_t offset = 0;
  for (int q = 0; q < reader; ++q) {
    if (q == publisher) continue;
    // Where the signature fixes the sizes, everybody's are the same.
    offset += plan_.uneven ? epoch_.of(publisher).sent(step_)[q] : plan_.out[q].nbytes;
  }
  return offset;
}

void Exchange::enter() {
  size_t payload = 0;
  size_t longest = 0;
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == epoch_.rank()) continue;
    longest = std::max(longest, plan_.out[q].nbytes);
    payload = plan_.common ? longest : payload + plan_.out[q].nbytes;
  }
  const bool direct = payload <= kDirectBytes;
  if (!direct) rounds_to_publish_ = div_up(longest, piece_bytes());
  std::byte* to = epoch_.mine().payload(step_);
  for (int q = 0; q < epoch_.size() && direct; ++q) {
    const Buffer& out = plan_.out[q];
    if (q == epoch_.rank() || out.nbytes == 0) continue;
    std::memcpy(to, out.data, out.nbytes);
    to += out.nbytes;
    if (plan_.common) break;
  }
  if (plan_.uneven) {
    meeting_.enter_uneven(direct, rounds_to_publish_, plan_.out, plan_.in);
  } else {
    meeting_.enter(direct, rounds_to_publish_, 0);
  }
}

// Everybody agrees, so our outputs may be written from here on.
void Exchange::start_reading() {
  reading_ = true;
  bool streams = false;
  for (int p = 0; p < epoch_.size(); ++p) {
    if (p == epoch_.rank() || plan_.in[p].nbytes == 0) continue;
    if (epoch_.of(p).entry(step_).direct != 0) continue;
    to_read_[p] = div_up(plan_.in[p].nbytes, piece_bytes());
    streams = true;
  }
  if (plan_.reduction) {
    // All contributions have the same size, so either all are direct or none is.
    if (!streams && plan_.result != nullptr) reduce_direct();
    return;
  }
  copy_own();
  for (int p = 0; p < epoch_.size(); ++p) {
    if (p != epoch_.rank() && plan_.in[p].nbytes != 0 && to_read_[p] == 0) read_direct(p);
  }
}

void Exchange::copy_own() {
  const Buffer& from = plan_.out[epoch_.rank()];
  const Buffer& to = plan_.in[epoch_.rank()];
  if (to.nbytes != 0 && from.data != to.data) std::memcpy(to.data, from.data, to.nbytes);
}

void Exchange::read_direct(int publisher) {
  std::memcpy(plan_.in[publisher].data,
              epoch_.of(publisher).payload(step_) + payload_offset(publisher, epoch_.rank()),
              plan_.in[publisher].nbytes);
}

void Exchange::reduce_direct() {
  std::vector<const std::byte*> sources(static_cast<size_t>(epoch_.size()));
  for (int p = 0; p < epoch_.size(); ++p) {
    sources[p] = p == epoch_.rank()
                     ? bytes(plan_.out[p])
                     : epoch_.of(p).payload(step_) + payload_offset(p, epoch_.rank());
  }
  reduce(*plan_.reduction, sources.data(), epoch_.size(), plan_.out[epoch_.rank()].nbytes,
         plan_.result, nullptr);
}

// Whether `reader` is done with the round that was in the slot of our next round before. A reader
// acknowledges only the rounds that hold something for it.
bool Exchange::slot_free_of(int reader) const {
  if (published_ < kSlots) return true;  // of earlier ops: all have left those, and so are done
  const uint64_t before = published_ - kSlots + 1;
  const uint64_t reads = div_up(plan_.out[reader].nbytes, piece_bytes());
  return rounds_read(reader, epoch_.rank()) >= std::min(before, reads);
}

bool Exchange::slot_free() const {
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q != epoch_.rank() && !slot_free_of(q)) return false;
  }
  return true;
}

bool Exchange::publish_round() {
  if (published_ == rounds_to_publish_ || !slot_free()) return false;
  const int rank = epoch_.rank();
  const uint64_t round = rounds_.published[rank].ring[kContributions] + published_;
  const size_t piece = piece_bytes();
  const size_t begin = published_ * piece;
  std::byte* slot = epoch_.mine().slot(kContributions, round);
  for (int q = 0; q < epoch_.size(); ++q) {
    const Buffer& out = plan_.out[q];
    if (q == rank || out.nbytes <= begin) continue;
    std::memcpy(slot + piece_offset(rank, q), bytes(out) + begin,
                std::min(piece, out.nbytes - begin));
    if (plan_.common) break;
  }
  epoch_.mine().header().published[kContributions].store(round + 1, std::memory_order_release);
  ++published_;
  epoch_.changed();
  return true;
}

uint64_t Exchange::rounds_of(int publisher) const {
  return epoch_.of(publisher).header().published[kContributions].load(std::memory_order_acquire) -
         rounds_.published[publisher].ring[kContributions];
}

uint64_t Exchange::rounds_for(int reader, int publisher) const {
  const Entry& entry = epoch_.of(publisher).entry(step_);
  if (entry.direct != 0) return 0;
  // Where the signature fixes the sizes, everybody's are the same.
  return plan_.uneven ? div_up(epoch_.of(publisher).sent(step_)[reader], piece_bytes())
                      : entry.rounds[kContributions];
}

uint64_t Exchange::rounds_read(int reader, int publisher) const {
  return epoch_.of(reader).consumed(publisher).rounds[kContributions].load(
             std::memory_order_acquire) -
         rounds_.published[publisher].ring[kContributions];
}

bool Exchange::read_rounds() {
  bool moved = false;
  const size_t piece = piece_bytes();
  for (int p = 0; p < epoch_.size(); ++p) {
    if (read_[p] == to_read_[p] || rounds_of(p) <= read_[p]) continue;
    const uint64_t round = rounds_.published[p].ring[kContributions] + read_[p];
    const size_t begin = read_[p] * piece;
    const Buffer& in = plan_.in[p];
    std::memcpy(bytes(in) + begin,
                epoch_.of(p).slot(kContributions, round) + piece_offset(p, epoch_.rank()),
                std::min(piece, in.nbytes - begin));
    ++read_[p];
    epoch_.mine().consumed(p).rounds[kContributions].store(round + 1, std::memory_order_release);
    moved = true;
  }
  if (moved) epoch_.changed();
  return moved;
}

// Reduces one round, once all publishers have it.
bool Exchange::reduce_round() {
  if (reading_done()) return false;
  const int rank = epoch_.rank();
  const uint64_t done = read_[rank == 0 ? 1 : 0];
  for (int p = 0; p < epoch_.size(); ++p) {
    if (p != rank && rounds_of(p) <= done) return false;
  }
  const size_t piece = piece_bytes();
  const size_t begin = done * piece;
  std::vector<const std::byte*> sources(static_cast<size_t>(epoch_.size()));
  for (int p = 0; p < epoch_.size(); ++p) {
    const uint64_t round = rounds_.published[p].ring[kContributions] + done;
    sources[p] = p == rank ? bytes(plan_.out[p]) + begin
                           : epoch_.of(p).slot(kContributions, round) + piece_offset(p, rank);
  }
  reduce(*plan_.reduction, sources.data(), epoch_.size(),
         std::min(piece, plan_.out[rank].nbytes - begin), plan_.result + begin, nullptr);
  for (int p = 0; p < epoch_.size(); ++p) {
    if (p == rank) continue;
    const uint64_t round = rounds_.published[p].ring[kContributions] + done;
    epoch_.mine().consumed(p).rounds[kContributions].store(round + 1, std::memory_order_release);
    ++read_[p];
  }
  epoch_.changed();
  return true;
}

bool Exchange::reading_done() const { return read_ == to_read_; }

std::vector<int> Exchange::waits_of(int rank) const {
  const uint64_t published = rounds_of(rank);
  const uint64_t before = published < kSlots ? 0 : published - kSlots + 1;
  const bool publishes = published < epoch_.of(rank).entry(step_).rounds[kContributions];
  bool all_data = true, any_data = false, all_slots = true;
  std::vector<int> ranks;
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == rank) continue;
    const uint64_t read = rounds_read(rank, q);
    const bool reads = read < rounds_for(rank, q);
    const bool has_data = rounds_of(q) > read;
    const bool has_slot = rounds_read(q, rank) >= std::min(before, rounds_for(q, rank));
    all_data = all_data && (!reads || has_data);
    any_data = any_data || (reads && has_data);
    all_slots = all_slots && has_slot;
    if ((reads && !has_data) || (publishes && !has_slot)) ranks.push_back(q);
  }
  // A reduction needs everybody's round at once.
  const bool can_read = any_data && (all_data || !plan_.reduction);
  const bool can_publish = publishes && all_slots;
  return can_read || can_publish ? std::vector<int>() : ranks;
}

}  // namespace gpumode::host
