#include <algorithm>
#include <cassert>

#include "core/communicator_impl.h"

namespace gpumode {

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

void Op::finish(const Status& status, TimePoint now) {
  std::lock_guard<std::mutex> lock(mutex_);
  status_ = status;
  finished_at_ = now;
  done_.store(true, std::memory_order_release);
}

void Op::release() {
  keepalive_.reset();
  for (auto& callback : callbacks_) callback();
  callbacks_.clear();
}

// -------------------------------------------------------------------------------------- submission

Status Communicator::Impl::start(const std::shared_ptr<Op>& op, std::vector<OpDesc> parts,
                                 SubmitOptions* options) {
  if (parts.empty()) return Status(Code::InvalidArgument, "an op needs at least one part");
  const bool p2p = is_p2p(parts.front().collective);
  op->collective_ = parts.front().collective;
  op->keepalive_ = std::move(options->keepalive);
  op->patient_ = options->patient;
  op->commits_ = parts.front().commits;
  uint64_t& counter = p2p ? num_p2p : num_collectives;

  std::lock_guard<std::mutex> gate_lock(gate);
  {
    std::lock_guard<std::mutex> lock(mutex);
    op->started_at_ = now();
    if (!failure.ok()) return failure;
    op->timeout_ = options->timeout > Duration::zero() ? options->timeout : timeout;
    op->deadline_ = after(op->started_at_, op->timeout_);
    op->tag_ = Tag{epoch, options->attempt, ++counter | (p2p ? Tag::kPointToPoint : 0)};
    in_flight.push_back(op);
  }
  if (options->on_start) options->on_start(op);
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
    op->finish(status, op->started_at_);
    op->release();
    impl_->settle();
    return op;
  }
  if (options.blocking) {
    impl_->wait(op.get(), Duration::zero());
    if (op->done()) return op;  // always, but in a callback, which must not wait
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

// -------------------------------------------------------------------------------------- membership

Status Communicator::Impl::rebuild(const Membership& membership, int rank, Duration limit) {
  const Status rebuilt(Code::Aborted, "the group was rebuilt");
  Lock lock(mutex);
  if (is_driver()) return Status(Code::InvalidArgument, "a callback must not rebuild the group");
  for (;;) {
    // An idle group closes silently: members that still finish its last op must not fail over it.
    if (!in_flight.empty()) {
      close(rebuilt, false);
    } else if (failure.ok()) {
      failure = rebuilt;
    }
    if (!driven) break;
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
  {
    std::lock_guard<std::mutex> drain(gate);
  }
  Status status = engine->rebuild(membership, rank, deadline);
  lock.lock();
  rebuilding = false;
  failure = status;
  failure_learned = false;
  if (status.ok()) {
    channel = engine->channel();
    epoch = static_cast<uint32_t>(membership.uuid);
    num_collectives = num_p2p = last_committed = 0;
    first_unfinished = std::numeric_limits<uint64_t>::max();
    next_check = TimePoint{};
    watchdog.reset(channel->size());
    if (!interruption.ok()) close(status = interruption, false);
  }
  interruption = Status();
  leave_role(&lock);
  return status;
}

// ------------------------------------------------------------------------------------- the surface

Communicator::Communicator(std::unique_ptr<Engine> engine, Options options)
    : impl_(std::make_unique<Impl>(std::move(engine), std::move(options))) {}

void Communicator::leave() {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (!impl_->in_flight.empty() && impl_->failure.ok()) {
      impl_->destroyed = true;
      impl_->close(Status(Code::Aborted, "the group was destroyed"), false);
    }
  }
  impl_->settle();
}

Communicator::~Communicator() {
  leave();
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->work_to_do.notify_one();
  if (impl_->worker.joinable()) impl_->worker.join();
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

std::vector<Presence> Communicator::presence() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  std::vector<Presence> presence;
  for (int r = 0; impl_->channel != nullptr && r < impl_->channel->size(); ++r) {
    presence.push_back(impl_->channel->presence(r));
  }
  return presence;
}

uint64_t Communicator::sequence_number() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->num_collectives;
}

Progress Communicator::progress() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return {impl_->num_collectives + 1, impl_->last_committed};
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

bool Communicator::reachable(const std::string& handle) const {
  return impl_->engine->reachable(handle);
}

int Communicator::initial_rank(const std::string& handle) const {
  return impl_->engine->initial_rank(handle);
}

}  // namespace gpumode
