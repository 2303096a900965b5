#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/channel.h"
#include "core/op.h"
#include "core/status.h"

namespace gpumode {

// Where an op is ordered: a CUDA stream, or the host's queue (null).
struct Lane {
  void* stream = nullptr;
};

// Whom the others waited for: the member that entered a collective last, and how long after the
// first one. Of a coalesced op the part counts that waited longest.
struct Straggler {
  int rank = -1;  // nobody, or not known
  Duration waited{};
};

struct Completion {
  Tag tag;
  Status status;
  int source_rank = -1;   // of a receive
  Straggler straggler{};  // of a collective
};

// The members of one epoch, in rank order, as the handles that Engine::handle gave them.
struct Membership {
  int64_t uuid = 0;  // never used before on this group
  std::vector<std::string> handles;
};

// The smallest interface that a data plane must offer. Deadlines, failure, agreement and futures
// are written once above it, in Communicator, and this interface knows nothing of them.
//
// Threads: `start` is called by one thread at a time, and may run beside `poll` and `wait`. `poll`,
// `wait`, `abort` and `rebuild` are called by one thread at a time, the driver. `wake` and the
// const members may be called from anywhere.
class Engine {
 public:
  virtual ~Engine() = default;

  // Null before the first rebuild. A rebuild replaces it.
  virtual Channel* channel() = 0;

  // What other members need to reach this engine, valid for the engine's lifetime. Handles sort in
  // the order of the ranks that the engines were created with.
  virtual std::string handle() const = 0;

  // Whether the member behind a handle may still come to a membership: false only if it is gone for
  // good. From any thread; not cheap.
  virtual bool reachable(const std::string& handle) const = 0;
  // The rank that the engine behind a handle was created with; -1 if it is no handle.
  virtual int initial_rank(const std::string& handle) const = 0;

  // Starts an op, on the caller's thread, and never waits for a peer. Collectives run in the order
  // of their starts; point-to-point transfers run beside them. The parts of a coalesced op belong
  // to one tag and complete together. Buffers stay valid until the op's completion was polled or
  // abort has returned. An error means that nothing was started.
  virtual Status start(const Tag& tag, std::vector<OpDesc> parts, Lane lane) = 0;

  // Advances what has been started as far as possible without waiting, appends what finished, and
  // returns whether anything moved.
  virtual bool poll(std::vector<Completion>* finished) = 0;

  // Returns when poll may find something new, at `until`, or after `wake`; spuriously too. A wake
  // that comes between a poll and the wait is not lost: that wait returns at once.
  virtual void wait(TimePoint until) = 0;
  virtual void wake() = 0;

  // The members that the op still waits for, as of the last poll; for liveness and for messages. A
  // collective waits for those that the one before it waits for. Empty for an op that is not in
  // flight. Called by the driver.
  virtual std::vector<int> waiting_for(const Tag& tag) const = 0;

  // Ends and forgets every started op. On return no thread and no kernel touches their buffers.
  virtual void abort() = 0;

  // Joins `membership` as its member `rank`; collective over it. On an error the engine has no
  // channel and may be rebuilt again. Memory that members of an earlier epoch can write is not
  // used again.
  virtual Status rebuild(const Membership& membership, int rank, TimePoint deadline) = 0;
};

}  // namespace gpumode
