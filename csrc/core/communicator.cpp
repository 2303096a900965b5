#include "core/communicator.h"

#include <algorithm>
#include <cassert>
#include <condition_variable>
#include <system_error>
#include <thread>
#include <utility>

#include "core/watchdog.h"

namespace gpumode {
namespace {

// The longest sleep: bounds what a lost wake-up, here or in an engine, could cost.
constexpr Duration kMaxSleep = std::chrono::milliseconds(250);
// Ops that keep moving are still checked this often.
constexpr Duration kCheckInterval = std::chrono::milliseconds(100);

TimePoint after(TimePoint now, Duration timeout) {
  return timeout < TimePoint::max() - now ? now + timeout : TimePoint::max();
}

}  // namespace

void Op::on_done(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Op::finish(const Status& status, int source_rank, TimePoint now) {
  std::lock_guard<std::mutex> lock(mutex_);
  status_ = status;
  source_rank_ = source_rank;
  finished_at_ = now;
  done_.store(true, std::memory_order_release);
}

void Op::release() {
  keepalive_.reset();
  for (auto& callback : callbacks_) callback();
  callbacks_.clear();
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
      : engine(std::move(engine)), use_worker(options.worker), timeout(options.timeout) {}

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
  bool check();

  void close(const Status& why, bool learned);
  void settle();
  void teardown();
  Status rebuild(const Membership& membership, int rank, Duration limit);

  TimePoint now() const { return channel ? channel->now() : Clock::now(); }
  bool is_driver() const { return driven && driver == std::this_thread::get_id(); }

  const std::unique_ptr<Engine> engine;
  const bool use_worker;

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
  uint64_t num_collectives = 0, num_p2p = 0;
  Duration timeout;
  std::vector<std::shared_ptr<Op>> in_flight;
  bool driven = false;
  std::thread::id driver;
  int num_sleepers = 0;
  bool stopping = false;
  std::thread worker;

  // The driver's own.
  Watchdog watchdog;
  std::vector<Completion> completions;
  std::vector<std::shared_ptr<Op>> retired;
  std::vector<WatchedOp> watched;
  TimePoint next_check{}, next_deadline{};
};

// ---------------------------------------------------------------------------------- submission

Status Communicator::Impl::start(const std::shared_ptr<Op>& op, std::vector<OpDesc> parts,
                                 SubmitOptions* options) {
  if (parts.empty()) return Status(Code::InvalidArgument, "an op needs at least one part");
  const bool p2p = is_p2p(parts.front().collective);
  op->collective_ = parts.front().collective;
  op->keepalive_ = std::move(options->keepalive);
  uint64_t& counter = p2p ? num_p2p : num_collectives;

  std::lock_guard<std::mutex> gate_lock(gate);
  {
    std::lock_guard<std::mutex> lock(mutex);
    op->started_at_ = now();
    if (!failure.ok()) return failure;
    op->timeout_ = options->timeout > Duration::zero() ? options->timeout : timeout;
    op->deadline_ = after(op->started_at_, op->timeout_);
    op->tag_ = Tag{epoch, 0, ++counter | (p2p ? Tag::kPointToPoint : 0)};
    in_flight.push_back(op);
  }
  Status status = engine->start(op->tag_, std::move(parts), options->lane);
  if (!status.ok()) {
    std::lock_guard<std::mutex> lock(mutex);
    in_flight.erase(std::find(in_flight.begin(), in_flight.end(), op));
    --counter;
    if (status.code != Code::InvalidArgument) close(status, false);
  }
  return status;
}

std::shared_ptr<Op> Communicator::submit(std::vector<OpDesc> parts, SubmitOptions options) {
  auto op = std::make_shared<Op>();
  const Status status = impl_->start(op, std::move(parts), &options);
  if (!status.ok()) {
    op->finish(status, -1, op->started_at_);
    op->release();
    impl_->settle();
    return op;
  }
  if (options.blocking) {
    impl_->wait(op.get(), Duration::zero());
    return op;
  }
  Impl::Lock lock(impl_->mutex);
  if (!impl_->driven) {
    impl_->take_role();
    lock.unlock();
    impl_->round();  // what needs no peer, or no more from it, is done now
    lock.lock();
    if (!op->done()) impl_->start_worker();
    impl_->leave_role(&lock);
  } else if (!op->done()) {
    impl_->start_worker();
    impl_->engine->wake();
  }
  return op;
}

// ------------------------------------------------------------------------------ the driver role

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
    worker = std::thread([this] { work(); });
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

// ------------------------------------------------------------------------------------- progress

// One round of the driver; returns whether it may be worth another one before waiting.
bool Communicator::Impl::round() {
  if (tearing_down) {
    teardown();
    return true;
  }
  if (channel == nullptr) return false;
  completions.clear();
  const bool moved = engine->poll(&completions);
  const TimePoint time = channel->now();
  if (!completions.empty() && !retire(time)) return true;
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
      const auto found =
          std::find_if(in_flight.begin(), in_flight.end(),
                       [&](const auto& op) { return op->tag_ == completion.tag; });
      assert(found != in_flight.end());
      if (!completion.status.ok()) {
        close(completion.status, false);  // before anybody sees that the op failed
        ok = false;
      }
      (*found)->finish(completion.status, completion.source_rank, time);
      retired.push_back(std::move(*found));
      in_flight.erase(found);
    }
    if (num_sleepers > 0) changed.notify_all();
  }
  for (const auto& op : retired) op->release();
  retired.clear();
  return ok;
}

// Asks the watchdog; returns whether there is something to do before waiting.
bool Communicator::Impl::check() {
  watched.clear();
  next_deadline = TimePoint::max();
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& op : in_flight) {
      watched.push_back({op->tag_, op->collective_, op->deadline_, op->timeout_});
      next_deadline = std::min(next_deadline, op->deadline_);
    }
  }
  const Verdict verdict = watchdog.check(*engine, *channel, watched);
  if (verdict.status.ok()) return verdict.again;
  std::lock_guard<std::mutex> lock(mutex);
  close(verdict.status, verdict.learned);
  return true;
}

bool Communicator::drive() {
  Impl::Lock lock(impl_->mutex);
  if (impl_->driven) return false;
  impl_->take_role();
  lock.unlock();
  const bool moved = impl_->round();
  lock.lock();
  impl_->leave_role(&lock);
  return moved;
}

// -------------------------------------------------------------------------- failure and rebuild

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
  {
    std::lock_guard<std::mutex> lock(mutex);
    why = said = failure;
    if (!failure_learned) {
      said.message = "rank " + std::to_string(channel->rank()) + ": " + said.message;
    }
  }
  channel->announce_failure(said);
  std::vector<std::shared_ptr<Op>> ended;
  {
    std::lock_guard<std::mutex> gate_lock(gate);  // no start beside the abort
    engine->abort();
    std::lock_guard<std::mutex> lock(mutex);
    ended.swap(in_flight);
    for (const auto& op : ended) op->finish(why, -1, channel->now());
    tearing_down = false;
    changed.notify_all();
  }
  for (const auto& op : ended) op->release();
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

Status Communicator::Impl::rebuild(const Membership& membership, int rank, Duration limit) {
  const Status rebuilt(Code::Aborted, "the group was rebuilt");
  Lock lock(mutex);
  if (is_driver()) return Status(Code::InvalidArgument, "a callback must not rebuild the group");
  // An idle group closes silently: members that still finish the last op must not fail over it.
  if (!in_flight.empty()) {
    close(rebuilt, false);
  } else if (failure.ok()) {
    failure = rebuilt;
  }
  while (driven) {
    engine->wake();
    sleep(&lock, kMaxSleep);
  }
  take_role();
  while (tearing_down) {
    lock.unlock();
    teardown();
    lock.lock();
  }
  rebuilding = true;
  const TimePoint deadline = after(now(), limit);
  channel = nullptr;
  lock.unlock();
  // The gate is closed; whoever went through before has left when it can be locked.
  { std::lock_guard<std::mutex> drain(gate); }
  Status status = engine->rebuild(membership, rank, deadline);
  lock.lock();
  rebuilding = false;
  failure = status;
  failure_learned = false;
  if (status.ok()) {
    channel = engine->channel();
    epoch = static_cast<uint32_t>(membership.uuid);
    num_collectives = num_p2p = 0;
    next_check = TimePoint{};
    watchdog.reset(channel->size());
    if (!interruption.ok()) close(status = interruption, false);
  }
  interruption = Status();
  leave_role(&lock);
  return status;
}

void Communicator::abort(Status why) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->rebuilding) {
      if (impl_->interruption.ok()) impl_->interruption = std::move(why);
      impl_->engine->wake();
      return;
    }
    impl_->close(why, false);
  }
  impl_->settle();
}

// ---------------------------------------------------------------------------------- the surface

Communicator::Communicator(std::unique_ptr<Engine> engine, Options options)
    : impl_(std::make_unique<Impl>(std::move(engine), options)) {}

Communicator::~Communicator() {
  const Status destroyed(Code::Aborted, "the group was destroyed");
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (!impl_->in_flight.empty()) impl_->close(destroyed, false);
    impl_->stopping = true;
  }
  impl_->settle();
  impl_->work_to_do.notify_one();
  if (impl_->worker.joinable()) impl_->worker.join();
}

Status Communicator::wait(const std::shared_ptr<Op>& op, Duration timeout) {
  return op->done() ? op->status() : impl_->wait(op.get(), timeout);
}

Status Communicator::rebuild(const Membership& membership, int rank, Duration timeout) {
  return impl_->rebuild(membership, rank, timeout);
}

Status Communicator::failure() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->failure;
}

int Communicator::rank() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->channel ? impl_->channel->rank() : -1;
}

int Communicator::size() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->channel ? impl_->channel->size() : 0;
}

uint64_t Communicator::sequence_number() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->num_collectives;
}

Duration Communicator::timeout() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->timeout;
}

void Communicator::set_timeout(Duration timeout) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->timeout = timeout;
}

std::string Communicator::handle() const { return impl_->engine->handle(); }

}  // namespace gpumode
