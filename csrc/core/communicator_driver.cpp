// The driver role of a Communicator: who has it, what a round does, and how a group fails.

#include <algorithm>
#include <cassert>
#include <system_error>

#include "core/communicator_impl.h"
#include "core/os/thread.h"

namespace gpumode {
namespace {

// Ops that keep moving are still checked this often.
constexpr Duration kCheckInterval = std::chrono::milliseconds(100);

}  // namespace

// ---------------------------------------------------------------------------------------- the role

void Communicator::Impl::take_role() {
  assert(!driven);
  driven = true;
  driver = std::this_thread::get_id();
}

void Communicator::Impl::leave_role(Lock* lock) {
  while (tearing_down) {
    lock->unlock();
    teardown();
    lock->lock();
  }
  driven = false;
  hand_over();
}

// A sleeper that was woken takes the role, or goes back to sleep since somebody has it, or leaves
// and hands over in its turn. So it is enough to wake the sleepers if there are any.
void Communicator::Impl::hand_over() {
  if (driven) return;
  if (num_sleepers > 0) {
    changed.notify_all();
  } else if (!in_flight.empty()) {
    work_to_do.notify_one();
  }
}

void Communicator::Impl::sleep(Lock* lock, Duration limit) {
  ++num_sleepers;
  changed.wait_for(*lock, std::min(limit, kMaxSleep));
  --num_sleepers;
}

template <typename Done>
void Communicator::Impl::drive_until(Lock* lock, Done done, TimePoint until) {
  take_role();
  lock->unlock();
  while (!done()) {
    if (round()) continue;
    const TimePoint time = channel->now();
    if (time >= until) break;
    engine->wait(std::min({until, next_deadline, time + kMaxSleep}));
  }
  lock->lock();
  leave_role(lock);
}

Status Communicator::Impl::wait(Op* op, Duration limit) {
  Lock lock(mutex);
  const bool limited = limit > Duration::zero();
  const TimePoint until = limited ? after(now(), limit) : TimePoint::max();
  while (!op->done()) {
    if (is_driver()) return Status(Code::InvalidArgument, "a callback must not wait for an op");
    const Duration left = limited ? until - now() : kMaxSleep;
    if (left <= Duration::zero()) break;
    if (driven) {
      sleep(&lock, left);
    } else {
      drive_until(&lock, [op] { return op->done(); }, until);
    }
  }
  hand_over();
  return op->done() ? op->status() : Status(Code::Timeout, "the op is still in flight");
}

void Communicator::Impl::start_worker() {
  if (!use_worker || worker.joinable()) return;
  try {
    worker = os::start_thread("gpumode_worker", [this] { work(); });
  } catch (const std::system_error& error) {
    close(Status(Code::Internal, std::string("cannot start a thread: ") + error.what()), false);
  }
}

void Communicator::Impl::work() {
  const auto nothing_left = [this] {
    std::lock_guard<std::mutex> lock(mutex);
    return stopping || in_flight.empty();
  };
  Lock lock(mutex);
  while (!stopping) {
    if (driven || in_flight.empty()) {
      work_to_do.wait(lock);
    } else {
      drive_until(&lock, nothing_left, TimePoint::max());
    }
  }
}

// ---------------------------------------------------------------------------------------- progress

// One round of the driver; returns whether it may be worth another one before waiting.
bool Communicator::Impl::round() {
  if (tearing_down) {
    teardown();
    return true;
  }
  if (channel == nullptr) return false;
  completions.clear();
  bool moved = engine->poll(&completions);
  const TimePoint time = channel->now();
  if (!completions.empty() && !retire(time)) return true;
  if (num_complete > 0 && commit(time)) moved = true;
  if (moved && time < next_check) return true;
  next_check = time + kCheckInterval;
  return check() || moved;
}

// Completes what has finished; false if a failure was among it.
bool Communicator::Impl::retire(TimePoint time) {
  bool ok = true;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const Completion& completion : completions) {
      const auto found = std::find_if(in_flight.begin(), in_flight.end(),
                                      [&](const auto& op) { return op->tag_ == completion.tag; });
      assert(found != in_flight.end());
      Status status = completion.status;
      bool learned = false;
      if (!completion.tag.p2p()) {
        if (status.ok()) {
          status = given_up(*channel, completion.tag.seq);
          learned = !status.ok();
        }
        if (!status.ok()) first_unfinished = std::min(first_unfinished, completion.tag.seq);
      }
      if (!status.ok()) {
        close(status, learned);  // before anybody sees that the op failed
        ok = false;
      }
      Op& op = **found;
      op.source_rank_ = completion.source_rank;
      if (status.ok()) op.straggler_ = completion.straggler;
      if (status.ok() && op.commits_) {
        op.complete_ = true;
        ++num_complete;
        channel->announce_done(op.tag_.seq);
        continue;
      }
      op.finish(status, time);
      retired.push_back(std::move(*found));
      in_flight.erase(found);
    }
    if (num_sleepers > 0) changed.notify_all();
  }
  release_retired();
  return ok;
}

// Ends ops that are complete here when they are so everywhere, in their order; returns whether it
// did. Either this or the failure of the group comes first, never half of both.
bool Communicator::Impl::commit(TimePoint time) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = in_flight.begin(); it != in_flight.end() && failure.ok();) {
      Op& op = **it;
      if (!op.complete_) {
        ++it;
        continue;
      }
      if (!not_done(*channel, op.tag_.seq).empty()) break;
      op.finish(Status(), time);
      last_committed = op.tag_.seq;
      --num_complete;
      retired.push_back(std::move(*it));
      it = in_flight.erase(it);
    }
    if (num_sleepers > 0 && !retired.empty()) changed.notify_all();
  }
  const bool any = !retired.empty();
  release_retired();
  return any;
}

void Communicator::Impl::release_retired() {
  for (const auto& op : retired) op->release();
  retired.clear();
}

// Asks the watchdog; returns whether there is something to do before waiting.
bool Communicator::Impl::check() {
  watched.clear();
  next_deadline = TimePoint::max();
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& op : in_flight) {
      watched.push_back(
          {op->tag_, op->collective_, op->deadline_, op->timeout_, op->patient_, op->complete_});
      next_deadline = std::min(next_deadline, op->deadline_);
    }
  }
  const Verdict verdict = watchdog.check(*engine, *channel, watched);
  if (verdict.status.ok()) return verdict.again;
  std::lock_guard<std::mutex> lock(mutex);
  close(verdict.status, verdict.learned);
  return true;
}

// ----------------------------------------------------------------------------------------- failure

// Under mutex. The first failure of an epoch counts.
void Communicator::Impl::close(const Status& why, bool learned) {
  assert(!why.ok());
  if (!failure.ok()) return;
  failure = why;
  failure_learned = learned;
  tearing_down = true;
}

// The driver carries out what close has recorded.
void Communicator::Impl::teardown() {
  Status why, said;
  uint64_t first;
  bool is_end;
  {
    std::lock_guard<std::mutex> lock(mutex);
    is_end = destroyed;
    first = std::min(first_unfinished, num_collectives + 1);
    for (const auto& op : in_flight) {
      if (!op->tag_.p2p()) first = std::min(first, op->tag_.seq);
    }
    why = said = failure;
    const int rank = channel->rank();
    if (destroyed) {  // to the others that is no abort: they may go on without us
      said = Status(Code::PeerLost,
                    "rank " + std::to_string(rank) + " left the group with ops in flight", {rank});
    } else if (!failure_learned) {
      said.message += " (from rank " + std::to_string(rank) + ")";
    }
  }
  channel->announce_failure(said, first);
  std::vector<std::shared_ptr<Op>> ended;
  {
    std::lock_guard<std::mutex> gate_lock(gate);  // no start beside the abort
    engine->abort();
    std::lock_guard<std::mutex> lock(mutex);
    ended.swap(in_flight);
    num_complete = 0;
    for (const auto& op : ended) op->finish(why, channel->now());
    tearing_down = false;
    changed.notify_all();
  }
  for (const auto& op : ended) op->release();
  if (on_failure && !is_end) on_failure(why);
}

// Returns when no teardown is pending. A callback, which runs on the driver, leaves it to the
// driver's next round.
void Communicator::Impl::settle() {
  if (!tearing_down) return;
  Lock lock(mutex);
  while (tearing_down && !is_driver()) {
    if (driven) {
      engine->wake();
      sleep(&lock, kMaxSleep);
    } else {
      take_role();
      leave_role(&lock);
    }
  }
  hand_over();
}

}  // namespace gpumode
