#pragma once

#include <vector>

#include "core/engine.h"

namespace gpumode {

// What the watchdog knows of an op in flight.
struct WatchedOp {
  Tag tag;
  Collective collective = Collective::Barrier;
  TimePoint deadline{};
  Duration timeout{};
  bool patient = false;
  bool complete = false;  // it waits only for the others to be done, too
};

struct Verdict {
  Status status;         // not Ok: the group must fail with it
  bool learned = false;  // another member found it, and has told everybody
  bool again = false;    // poll and check once more before waiting
};

// Decides whether a group whose ops do not move has failed: because a member said so, because a
// member that an op waits for is dead, or because a deadline has passed. It has no thread; whoever
// drives the group asks it, after a poll.
//
// A member may die, or give up on a later op, after its last bytes are on their way. So a death and
// what a member said count only from the check after the one that saw it, with a poll in between. A
// dead member that nobody waits for is no
// failure: it may have finished and left.
class Watchdog {
 public:
  void reset(int world_size) {
    known_dead_.assign(static_cast<size_t>(world_size), false);
    heard_ = false;
  }

  Verdict check(const Engine& engine, const Channel& channel, const std::vector<WatchedOp>& ops);

 private:
  Verdict check_deaths(const Engine& engine, const Channel& channel,
                       const std::vector<WatchedOp>& ops);

  std::vector<bool> known_dead_;  // by rank; seen dead before the last poll
  bool heard_ = false;            // a member had given up before the last poll
};

// The members that are not done with op `seq`.
std::vector<int> not_done(const Channel& channel, uint64_t seq);

// Why another member gave up on collective `seq` or an earlier one; Ok if none did. Then the op
// must not succeed here: a member that comes late finds the entries of those who have left.
Status given_up(const Channel& channel, uint64_t seq);

}  // namespace gpumode
