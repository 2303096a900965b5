#pragma once

#include <cstdint>
#include <vector>

#include "core/engine.h"
#include "core/op.h"
#include "core/signature.h"
#include "core/status.h"
#include "host/epoch.h"

namespace gpumode::host {

// How many rounds every member has published in the ops that are over, per ring. All members count
// the same, since each op's entries say how many rounds it takes.
struct Rounds {
  explicit Rounds(int size) : published(static_cast<size_t>(size)) {}
  struct PerRing {
    uint64_t ring[kNumRings] = {};
  };
  std::vector<PerRing> published;
};

// The parts of a coalesced op are steps of their own, and everybody counts the same steps.
struct OpId {
  uint64_t step;  // 1, 2, ... within the epoch
  uint64_t seq;   // the op that the step belongs to; for messages
};

// What a collective is built from: this rank's place in the epoch and in the order of ops.
struct Context {
  Epoch& epoch;
  Rounds& rounds;
  OpId id;
  const Signature& signature;
};

// The first phase of every collective: enter, say what we are about to do, and wait until all
// members have said the same. It makes each collective a barrier, and is what lets a difference
// between two members be an error on all of them instead of a hang.
class Meeting {
 public:
  explicit Meeting(const Context& context);

  // Enters, with the rounds that will follow, or none if the payload is in the entry already.
  void enter(bool direct, uint64_t contribution_rounds, uint64_t result_rounds);
  // The same where the signature leaves the sizes open: says how many bytes there are for each rank
  // and how many we expect from each, and checks that all pairs of members agree.
  void enter_uneven(bool direct, uint64_t rounds, const std::vector<Buffer>& sent,
                    const std::vector<Buffer>& expected);
  bool entered() const { return entered_; }

  // Looks for members that have entered since the last call; returns whether anything moved.
  bool look();
  bool complete() const { return num_missing_ == 0; }
  const Status& status() const { return status_; }
  std::vector<int> missing() const;
  // Of those that have entered so far.
  Straggler straggler() const;

  // Leaves the op: counts everybody's rounds, and tells publishers that we need theirs no more.
  void leave(Rounds* rounds);

 private:
  bool all_others_entered() const;
  Status check_sizes() const;

  Epoch& epoch_;
  const OpId id_;
  const Signature signature_;
  std::vector<bool> met_;
  int num_missing_;
  bool entered_ = false, uneven_ = false;
  Status status_;
};

// A collective in progress on this rank: a state machine that never waits.
class Task {
 public:
  virtual ~Task() = default;

  // Does a bounded amount of work, at most about a slot of bytes of each kind; returns whether
  // anything moved.
  virtual bool step() = 0;
  bool done() const { return done_; }
  // Mismatch ends a task early.
  const Status& status() const { return status_; }
  const Straggler& straggler() const { return straggler_; }
  // The members that hold this rank up, directly or through others: who can go on, and does not,
  // or is dead. A living member that itself waits is not among them.
  std::vector<int> waiting_for() const;

 protected:
  explicit Task(const Context& context) : epoch_(context.epoch), meeting_(context) {}

  // Whose moves `rank` waits for, once all have met, as shared memory tells; nobody's if it can go
  // on by itself.
  virtual std::vector<int> waits_of(int rank) const = 0;

  void finish(Status status) {
    status_ = std::move(status);
    straggler_ = meeting_.straggler();
    done_ = true;
  }

  Epoch& epoch_;
  Meeting meeting_;

 private:
  Status status_;
  Straggler straggler_;
  bool done_ = false;
};

}  // namespace gpumode::host
