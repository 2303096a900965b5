#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/communicator.h"
#include "core/watchdog.h"

namespace gpumode {

// The longest sleep: bounds what a lost wake-up, here or in an engine, could cost.
constexpr Duration kMaxSleep = std::chrono::milliseconds(250);

// The end of a timeout that may be longer than the clock is.
inline TimePoint after(TimePoint now, Duration timeout) {
  return timeout < TimePoint::max() - now ? now + timeout : TimePoint::max();
}

// Who does what: any thread submits, behind `gate`. One thread at a time has the driver role: it
// polls, waits, aborts and rebuilds, that is, it calls everything in Engine but start and wake. A
// thread that waits for an op takes the role if it is free; the worker takes it when ops are in
// flight and no thread waits.
//
// Nothing is stranded, since `mutex` guards all that a sleeper looks at, and whoever gives up the
// role or a wait calls hand_over. A failure is recorded by close, under `mutex`, and carried out
// by the driver in teardown; the role is never given up with a teardown pending.
//
// Lock order: gate, mutex, Op::mutex_. Callbacks and releases of buffers run under none of them.
struct Communicator::Impl {
  using Lock = std::unique_lock<std::mutex>;

  Impl(std::unique_ptr<Engine> engine, Options options)
      : engine(std::move(engine)),
        use_worker(options.worker),
        on_failure(std::move(options.on_failure)),
        timeout(options.timeout) {}

  Status start(const std::shared_ptr<Op>& op, std::vector<OpDesc> parts, SubmitOptions* options);
  void start_worker();
  void work();

  void take_role();
  void leave_role(Lock* lock);
  void hand_over();
  void sleep(Lock* lock, Duration limit);
  template <typename Done>
  void drive_until(Lock* lock, Done done, TimePoint until);
  Status wait(Op* op, Duration limit);

  bool round();
  bool retire(TimePoint now);
  bool commit(TimePoint now);
  void release_retired();
  bool check();

  void close(const Status& why, bool learned);
  void settle();
  void teardown();
  Status rebuild(const Membership& membership, int rank, Duration limit);

  TimePoint now() const { return channel ? channel->now() : Clock::now(); }
  bool is_driver() const { return driven && driver == std::this_thread::get_id(); }

  const std::unique_ptr<Engine> engine;
  const bool use_worker;
  const std::function<void(const Status&)> on_failure;

  std::mutex gate;  // held while an op gets its number and is started: starts are in this order

  mutable std::mutex mutex;
  std::condition_variable changed;  // an op is done, the role is free, or a teardown is over
  std::condition_variable work_to_do;

  // Guarded by mutex. The driver may read `channel` without it: only a driver writes it.
  Channel* channel = nullptr;
  Status failure{Code::InvalidArgument, "the group has no members yet"};
  bool failure_learned = false;
  std::atomic<bool> tearing_down{false};
  bool rebuilding = false;
  Status interruption;  // of a rebuild, by abort
  uint32_t epoch = 0;
  uint64_t num_collectives = 0, num_p2p = 0, last_committed = 0;
  // Of those that have failed, the first; for the other members.
  uint64_t first_unfinished = std::numeric_limits<uint64_t>::max();
  Duration timeout;
  std::vector<std::shared_ptr<Op>> in_flight;
  bool driven = false;
  std::thread::id driver;
  int num_sleepers = 0;
  bool stopping = false, destroyed = false;  // the latter: that is the failure
  std::thread worker;

  // The driver's own.
  Watchdog watchdog;
  int num_complete = 0;  // ops in flight that wait for the others to be done, too
  std::vector<Completion> completions;
  std::vector<std::shared_ptr<Op>> retired;
  std::vector<WatchedOp> watched;
  TimePoint next_check{}, next_deadline{};
};

}  // namespace gpumode
