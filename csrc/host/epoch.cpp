#include "host/epoch.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/os/cpu_relax.h"
#include "core/os/futex.h"
#include "host/peer_watch.h"

namespace gpumode::host {
namespace {

void note_processors(Header& header) {
  cpu_set_t set;
  static_assert(sizeof(set) == sizeof(header.processors), "one bit each");
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    std::memcpy(header.processors, &set, sizeof(set));
  } else {
    header.processors[0] = 1;
  }
}

Bell& bell(const os::SharedMemory& memory) { return *reinterpret_cast<Bell*>(memory.data()); }

void ring(Bell& b) {
  b.rings.fetch_add(1, std::memory_order_release);
  os::futex_wake(&b.rings);
}

}  // namespace

Epoch::Epoch(int rank, int size)
    : rank_(rank),
      size_(size),
      presence_(new std::atomic<Presence>[static_cast<size_t>(size)]()),
      seen_(static_cast<size_t>(size)) {}

Status Epoch::join(Endpoint& endpoint, const Membership& membership, int rank, TimePoint deadline,
                   std::unique_ptr<Epoch>* epoch) {
  const int size = static_cast<int>(membership.handles.size());
  std::unique_ptr<Epoch> made(new Epoch(rank, size));
  os::Fd segment_fd, bell_fd;
  if (Status s = Segment::create(size, &made->mine_, &segment_fd); !s.ok()) return s;
  note_processors(made->mine_.header());
  Status s = os::SharedMemory::create(sizeof(Bell), &made->my_bell_, &bell_fd);
  if (!s.ok()) return s;
  s = endpoint.connect(membership, rank, segment_fd, bell_fd, deadline, &made->links_);
  if (!s.ok()) return s;
  made->crowded_ = made->count_processors() < size;
  for (int q = 0; q < size; ++q) {
    const Link& link = made->links_[q];
    if (q == rank) continue;
    Epoch* self = made.get();
    made->watches_.push_back(PeerWatch::instance().add(
        link.socket.get(), link.pidfd.get(), link.life, [self, q](Presence now) {
          self->presence_[q].store(now, std::memory_order_release);
          self->wake();
        }));
  }
  *epoch = std::move(made);
  return {};
}

int Epoch::count_processors() const {
  int count = 0;
  for (size_t word = 0; word < std::size(mine_.header().processors); ++word) {
    uint64_t any = 0;
    for (int q = 0; q < size_; ++q) any |= of(q).header().processors[word];
    count += __builtin_popcountll(any);
  }
  return count;
}

Epoch::~Epoch() {
  for (const uint64_t id : watches_) PeerWatch::instance().remove(id);
}

void Epoch::announce(uint64_t seq, const Signature& signature) {
  Entry& entry = mine_.entry(seq);
  entry.signature = signature;
  entry.step.store(seq, std::memory_order_release);
  changed();
}

bool Epoch::entered(int rank, uint64_t seq, Signature* signature) const {
  const Entry& entry = of(rank).entry(seq);
  if (entry.step.load(std::memory_order_acquire) != seq) return false;
  if (signature != nullptr) *signature = entry.signature;
  return true;
}

// As when an op is entered (Meeting): nobody can go on before the last one is done, so only that
// one wakes the others.
void Epoch::announce_done(uint64_t seq) {
  mine_.header().done.store(seq, std::memory_order_seq_cst);
  for (int q = 0; q < size_; ++q) {
    if (!done(q, seq)) return changed_quietly();
  }
  changed();
}

void Epoch::announce_failure(const Status& why, uint64_t first_unfinished) {
  Failure& failure = mine_.header().failure;
  if (failure.announced.load(std::memory_order_relaxed) != 0) return;
  failure.first_unfinished = first_unfinished;
  failure.code = static_cast<uint32_t>(why.code);
  failure.num_ranks = static_cast<uint32_t>(std::min(why.ranks.size(), std::size(failure.ranks)));
  std::copy_n(why.ranks.begin(), failure.num_ranks, failure.ranks);
  const size_t length = std::min(why.message.size(), sizeof(failure.message) - 1);
  std::memcpy(failure.message, why.message.data(), length);
  failure.message[length] = '\0';
  failure.announced.store(1, std::memory_order_release);
  changed();
}

bool Epoch::failed(int rank, Status* why, uint64_t* first_unfinished) const {
  const Failure& failure = of(rank).header().failure;
  if (failure.announced.load(std::memory_order_acquire) == 0) return false;
  *first_unfinished = failure.first_unfinished;
  why->code = static_cast<Code>(failure.code);
  const size_t n = std::min<size_t>(failure.num_ranks, std::size(failure.ranks));
  why->ranks.assign(failure.ranks, failure.ranks + n);
  why->message.assign(failure.message, ::strnlen(failure.message, sizeof(failure.message)));
  return true;
}

void Epoch::changed_quietly() {
  std::atomic<uint64_t>& events = mine_.header().events;
  events.store(events.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
}

void Epoch::changed() {
  changed_quietly();
  ring_sleepers();
}

// Sequentially consistent on both sides, here and in sleep(): either the sleeper sees our event, or
// we see it asleep.
void Epoch::ring_sleepers() {
  for (int q = 0; q < size_; ++q) {
    if (q == rank_) continue;
    const Link& link = links_[q];
    if (link.segment.header().sleeping.load(std::memory_order_seq_cst) != 0) ring(bell(link.bell));
  }
}

void Epoch::wake() {
  local_events_.fetch_add(1, std::memory_order_seq_cst);
  if (mine_.header().sleeping.load(std::memory_order_seq_cst) != 0) ring(bell(my_bell_));
}

void Epoch::look() {
  for (int q = 0; q < size_; ++q) {
    if (q != rank_) seen_[q] = of(q).header().events.load(std::memory_order_acquire);
  }
  seen_local_ = local_events_.load(std::memory_order_acquire);
}

bool Epoch::news() const {
  for (int q = 0; q < size_; ++q) {
    if (q != rank_ && of(q).header().events.load(std::memory_order_seq_cst) != seen_[q]) {
      return true;
    }
  }
  return local_events_.load(std::memory_order_seq_cst) != seen_local_;
}

void Epoch::sleep(TimePoint until, Duration spin) {
  const TimePoint spin_until = std::min(until, Clock::now() + spin);
  do {
    for (int i = 0; i < (crowded_ ? 1 : 32); ++i) {
      if (news()) return;
      // In a crowd the news may have to come from a member that waits for this processor, and
      // handing it over costs a fraction of sleeping and being woken.
      crowded_ ? std::this_thread::yield() : os::cpu_relax();
    }
  } while (Clock::now() < spin_until);

  Bell& b = bell(my_bell_);
  const uint32_t rings = b.rings.load(std::memory_order_acquire);
  std::atomic<uint32_t>& sleeping = mine_.header().sleeping;
  sleeping.store(1, std::memory_order_seq_cst);
  if (!news()) os::futex_wait(&b.rings, rings, until - Clock::now());
  sleeping.store(0, std::memory_order_relaxed);
}

}  // namespace gpumode::host
