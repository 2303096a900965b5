#include "c10d/recovery.h"

#include <algorithm>
#include <utility>

#include "c10d/backend.h"
#include "c10d/exceptions.h"
#include "c10d/exit.h"

namespace gpumode {
namespace {

// How much longer than the deadline the store may take to answer.
constexpr auto kGrace = std::chrono::milliseconds(500);

thread_local RetryScope* innermost_scope = nullptr;

TimePoint after(Duration timeout) { return Clock::now() + timeout; }

}  // namespace

Turn::Turn(std::shared_ptr<RecoveryState> state, c10::intrusive_ptr<::c10d::Store> store,
           TimePoint deadline)
    : state_(std::move(state)), registry_(std::move(store), deadline + kGrace) {
  const BlockingCall blocking;
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (!state_->freed.wait_until(lock, deadline, [this] { return !state_->taken; })) {
    throw_if_failed({Code::Timeout,
                     "another thread of this process was in a retried op, or rebuilt "
                     "the group, until the time was up"});
  }
  state_->taken = true;
}

Turn::~Turn() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->taken = false;
  state_->freed.notify_one();
}

RetryScope::RetryScope(Backend* backend, Duration timeout, std::optional<int> min_size)
    : timeout(timeout),
      min_size(min_size),
      callers(backend->membership()),
      backend_(backend),
      outer_(innermost_scope) {
  innermost_scope = this;
}

RetryScope::~RetryScope() { innermost_scope = outer_; }

RetryScope* RetryScope::current(const Backend* backend) {
  auto* scope = innermost_scope;
  while (scope != nullptr && scope->backend_ != backend) {
    scope = scope->outer_;
  }
  return scope;
}

// Backend's part

Backend::WorkPtr Backend::run_retried(Call call, RetryScope* scope) {
  for (const auto& part : call.parts) {
    TORCH_CHECK_VALUE(!is_p2p(part.collective), "retry: expected a collective, not ",
                      name(part.collective));
    TORCH_CHECK_VALUE(!part.prepare, "retry: sparse tensors are not supported");
  }
  TORCH_CHECK_VALUE(!call.parts.empty(), "retry: expected one tensor at least");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_VALUE(open_coalescing() == nullptr,
                      "retry: an op that is coalesced with others cannot be retried");
  }
  const auto communicator = this->communicator();
  Retry::Options options;
  options.deadline = after(scope->timeout);
  options.min_size = scope->min_size;
  options.submit = [&](std::vector<OpDesc> parts, uint32_t attempt, Duration timeout) {
    auto tried = call;
    tried.parts = std::move(parts);
    tried.timeout = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(timeout),
                             std::chrono::milliseconds(1));
    tried.async_op = false;
    tried.attempt = attempt;
    auto descriptions = describe({&tried, 1});
    auto op = submit_profiled(*communicator, std::move(tried), std::move(descriptions));
    call_hooks(op, call.type);
    return op;
  };
  options.on_joining = [this] { before_joining(); };
  options.on_joined = [this, lineage = &recovery_->lineage] { joined(lineage->built); };
  options.interrupted = [this, num_aborts = num_aborts_.load()] {
    return num_aborts == num_aborts_ ? Status() : Status(Code::Aborted, "the op was aborted");
  };
  options.callers = scope->callers;
  if (membership() != scope->callers) {
    throw_if_failed({Code::Aborted, "another thread rebuilt the group when the op had begun"});
  }
  Turn turn(recovery_, store_, options.deadline);
  throw_if_failed(options.interrupted());
  Retry retry(communicator.get(), turn.registry(), turn.lineage(), turn.scratch(), call.parts,
              std::move(options));
  {
    const BlockingCall blocking;
    retry.run();
  }
  throw_if_failed(retry.status());
  const auto& contributors = retry.contributors();
  scope->contributors =
      contributors == turn.lineage()->built ? initial_ranks() : initial_ranks_of(*contributors);
  scope->num_attempts = retry.num_attempts();
  auto work =
      c10::make_intrusive<Work>(current_rank_, call.type, call.title, call.inputs, call.outputs);
  work->start_done({});
  return work;
}

std::unique_ptr<Rebuild> Backend::begin_rebuild(std::chrono::milliseconds timeout,
                                                std::optional<int> min_size) {
  TORCH_CHECK(current_uuid_ >= 0, "the group has no members yet: call reconfigure() first");
  const auto why = "rank " + std::to_string(current_rank_) + " rebuilds the group";
  Succession::Options options;
  options.deadline = after(to_duration(timeout));
  options.min_size = min_size;
  const auto self = c10::intrusive_ptr<Backend>::reclaim_copy(this);
  options.on_joining = [self] { self->before_joining(); };
  options.on_joined = [self] { self->joined(self->recovery_->lineage.built); };
  // A retried op of another thread has the turn until it ends.
  ++num_aborts_;
  if (failure().ok()) {
    abort(why);
  }
  auto turn = std::make_unique<Turn>(recovery_, store_, options.deadline);
  if (failure().ok()) {
    abort(why);
  }
  return std::make_unique<Rebuild>(communicator(), std::move(turn), options);
}

namespace {

Report report_of_restart(const Communicator& communicator) {
  Report report;
  report.committed = communicator.progress().committed;
  report.restarts = true;
  return report;
}

}  // namespace

Rebuild::Rebuild(std::shared_ptr<Communicator> communicator, std::unique_ptr<Turn> turn,
                 const Succession::Options& options)
    : communicator_(std::move(communicator)),
      turn_(std::move(turn)),
      succession_(communicator_.get(), turn_->registry(), turn_->lineage(),
                  report_of_restart(*communicator_), options) {}

std::optional<Duration> Rebuild::step() {
  TORCH_CHECK(turn_ != nullptr, "this rebuild is over");
  const BlockingCall blocking;
  switch (succession_.step()) {
    case Succession::State::Working:
    case Succession::State::Decided:
      return Duration::zero();
    case Succession::State::Waiting:
      return std::max(succession_.look_again() - Clock::now(), Duration::zero());
    case Succession::State::Joined:
      close();
      return std::nullopt;
    case Succession::State::Failed:
      close();
      throw_if_failed(succession_.status());
  }
  return std::nullopt;
}

}  // namespace gpumode
