#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"

namespace gpumode {

class Communicator;

// One submitted op. Thread-safe. Outlives its communicator if somebody keeps it.
class Op {
 public:
  Tag tag() const { return tag_; }                       // seq 0 if the gate was closed
  Collective collective() const { return collective_; }  // of the first part
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done.
  const Status& status() const { return status_; }
  int source_rank() const { return source_rank_; }
  const Straggler& straggler() const { return straggler_; }
  // Of an op that commits: whether this member's part was done, and the others were told so. If the
  // op has failed nevertheless, its result is whole where it was written, and another member may
  // have succeeded with the same.
  bool complete() const { return complete_; }
  TimePoint started_at() const { return started_at_; }
  TimePoint finished_at() const { return finished_at_; }
  Duration timeout() const { return timeout_; }

  // Runs `callback` when the op is done: at once if it is, else on the thread that completes it,
  // which holds no lock of ours meanwhile. It must not wait for an op, nor destroy the
  // communicator.
  void on_done(std::function<void()> callback);

 private:
  friend class Communicator;
  void finish(const Status& status, TimePoint now);
  void release();  // once finished: runs the callbacks and lets go of the buffers

  Tag tag_;
  Collective collective_ = Collective::Barrier;
  TimePoint started_at_{}, deadline_{}, finished_at_{};
  Duration timeout_{};
  bool patient_ = false, commits_ = false, complete_ = false;
  std::shared_ptr<void> keepalive_;  // released when the op is done
  std::vector<std::function<void()>> callbacks_;
  Status status_;
  int source_rank_ = -1;
  Straggler straggler_;
  std::mutex mutex_;  // guards the callbacks against done_
  std::atomic<bool> done_{false};
};

struct SubmitOptions {
  Duration timeout{};  // 0: the communicator's
  Lane lane;
  std::shared_ptr<void> keepalive;  // owns the buffers; released when the op is done
  // The caller will wait at once: run the op on this thread instead of waking the worker.
  bool blocking = false;
  // Called with the op once it has its tag, before anything can end it; not with a refused one. In
  // the order of the tags. It must not wait, nor call the communicator.
  std::function<void(const std::shared_ptr<Op>&)> on_start;
  // A lost member fails the op only once nobody else is waited for: it is to name all that are
  // missing.
  bool patient = false;
  uint32_t attempt = 0;  // of Tag
};

// How far a member has come in its epoch.
struct Progress {
  uint64_t next = 1;       // the number that the next collective gets, or would get
  uint64_t committed = 0;  // the last op that commits and succeeded
};

// The control plane of one group on one engine: order, deadlines, failure, completion.
//
// Ops run on whoever drives: a caller that waits, or the worker thread. After the first failure
// the gate is closed: every op in flight and every later one ends with that status, on all
// members, until the group is rebuilt.
class Communicator {
 public:
  struct Options {
    Duration timeout = std::chrono::minutes(30);
    bool worker = true;  // false: only drive() and wait() make progress (simulations)
    // Called for each failure of the group but its destruction, when all that was in flight has
    // ended; without a lock of ours. It must not wait, nor call the communicator.
    std::function<void(const Status&)> on_failure;
  };

  Communicator(std::unique_ptr<Engine> engine, Options options);
  ~Communicator();  // leaves, and joins the worker
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Never waits for a peer unless `blocking`: then it returns when the op is done. If the gate is
  // closed, or the engine refuses the op as invalid, the op comes back failed; an invalid one takes
  // no sequence number and leaves the gate open.
  std::shared_ptr<Op> submit(std::vector<OpDesc> parts, SubmitOptions options);

  // Waits until the op is done, and returns its status; Timeout after `timeout` (0: no bound but
  // the op's own deadline), which leaves the op in flight.
  Status wait(const std::shared_ptr<Op>& op, Duration timeout = Duration::zero());

  // One round of progress and checks, for simulations; returns whether anything moved.
  bool drive();

  // Fails everything in flight and closes the gate, here and on all members. `why` must not be Ok.
  // Bounded; may be called from any thread, any number of times; the first reason stays.
  void abort(Status why);
  // Ends what is in flight here, since this member goes, and tells its peers if there is any.
  void leave();

  // Aborts what is in flight, joins the new membership, and opens the gate. On an error the gate
  // stays closed with that error, and rebuild may be called again.
  Status rebuild(const Membership& membership, int rank, Duration timeout);

  // Ok while the gate is open.
  Status failure() const;

  int rank() const;  // -1 while there is no membership
  int size() const;  // 0 while there is no membership
  // What is known of the members of the current membership, by rank.
  std::vector<Presence> presence() const;
  // Collectives submitted so far in this epoch; point-to-point ops do not count.
  uint64_t sequence_number() const;
  Progress progress() const;
  Duration timeout() const;
  void set_timeout(Duration timeout);
  std::string handle() const;
  // See Engine.
  bool reachable(const std::string& handle) const;
  int initial_rank(const std::string& handle) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gpumode
