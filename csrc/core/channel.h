#pragma once

#include <chrono>
#include <cstdint>

#include "core/signature.h"
#include "core/status.h"

namespace gpumode {

// Time as the control plane sees it: the monotonic clock, or a simulation's virtual one.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

// Whether a member takes part. One that has left may be in a later membership.
enum class Presence : uint8_t { Here, Left, Dead };

// Short control messages between the members of one epoch, each member's liveness, and the clock.
//
// Every message is one member's word to all others, and each member only ever writes its own: the
// op that it has entered, the one that it is done with, and, once, why it failed. A reader sees the
// words in the order in which they were announced, and still sees them after the writer has died.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual TimePoint now() const = 0;

  // What is known of a member; it never comes back within an epoch.
  virtual Presence presence(int rank) const = 0;
  bool alive(int rank) const { return presence(rank) == Presence::Here; }

  // This rank enters op `seq`. Ops are entered in order, and op n+2 only when op n has finished
  // here: so a member that has entered n+1 knows that everybody has entered n.
  virtual void announce(uint64_t seq, const Signature& signature) = 0;
  // Whether `rank` has entered op `seq`, the op that this rank is in; if so its signature is read.
  virtual bool entered(int rank, uint64_t seq, Signature* signature) const = 0;

  // This rank is done with its part of op `seq`, one that commits, and with all before it.
  virtual void announce_done(uint64_t seq) = 0;
  virtual bool done(int rank, uint64_t seq) const = 0;

  // This rank gives up on the epoch, and says why and which collective is the first that it has not
  // finished. Only the first call counts.
  virtual void announce_failure(const Status& why, uint64_t first_unfinished) = 0;
  // Whether `rank` gave up; if so what it said is read.
  virtual bool failed(int rank, Status* why, uint64_t* first_unfinished) const = 0;
};

}  // namespace gpumode
