#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/channel.h"
#include "host/endpoint.h"
#include "host/segment.h"

namespace gpumode::host {

// Everything that one membership shares, as its member `rank` sees it: the segments, the links,
// who is alive, and the waking of sleepers. It is the group's Channel, too.
class Epoch : public Channel {
 public:
  static Status join(Endpoint& endpoint, const Membership& membership, int rank, TimePoint deadline,
                     std::unique_ptr<Epoch>* epoch);
  ~Epoch() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  TimePoint now() const override { return Clock::now(); }
  Presence presence(int rank) const override {
    return presence_[static_cast<size_t>(rank)].load(std::memory_order_acquire);
  }
  void announce(uint64_t seq, const Signature& signature) override;
  bool entered(int rank, uint64_t seq, Signature* signature) const override;
  void announce_done(uint64_t seq) override;
  bool done(int rank, uint64_t seq) const override {
    return of(rank).header().done.load(std::memory_order_seq_cst) >= seq;
  }
  void announce_failure(const Status& why, uint64_t first_unfinished) override;
  bool failed(int rank, Status* why, uint64_t* first_unfinished) const override;

  const Segment& mine() const { return mine_; }
  // Read-only for any rank but ours.
  const Segment& of(int rank) const { return rank == rank_ ? mine_ : links_[rank].segment; }

  // Whether there are more members than processors for them.
  bool crowded() const { return crowded_; }

  // Tells peers that our segment changed, and wakes those that sleep.
  void changed();
  // The same for a change that nobody can act on yet.
  void changed_quietly();
  // Wakes this rank out of sleep(); from any thread.
  void wake();

  // Sleeping in two steps, so that no change is lost: look() before polling remembers what is
  // there; sleep() returns as soon as anything is newer than that, or at `until`. It spins for
  // `spin` before it sleeps; in a crowd it yields the processor instead, once at least.
  void look();
  void sleep(TimePoint until, Duration spin);

 private:
  Epoch(int rank, int size);
  int count_processors() const;
  void ring_sleepers();
  bool news() const;

  const int rank_, size_;
  bool crowded_ = false;
  Segment mine_;
  os::SharedMemory my_bell_;
  std::vector<Link> links_;
  std::vector<uint64_t> watches_;
  std::unique_ptr<std::atomic<Presence>[]> presence_;
  std::atomic<uint64_t> local_events_{0};
  std::vector<uint64_t> seen_;
  uint64_t seen_local_ = 0;
};

}  // namespace gpumode::host
