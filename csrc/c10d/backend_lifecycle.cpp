#include <algorithm>
#include <utility>

#include "c10d/backend.h"
#include "c10d/backend_state.h"
#include "c10d/engine_choice.h"
#include "c10d/exceptions.h"
#include "c10d/exit.h"
#include "c10d/fork.h"
#include "c10d/recovery.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace gpumode {

// Timeouts

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "timeout: expected a positive one, got ", timeout.count(),
                    " ms");
  communicator()->set_timeout(to_duration(timeout));
  options_->timeout = timeout;
}

// An extension counts for every op from its call on until the first of them is done. The time of a
// retried op bounds all attempts, and is not extended.
Duration Backend::timeout_of(const Call& call, const Communicator& communicator) const {
  Duration timeout = call.timeout.count() > 0 ? to_duration(call.timeout) : Duration::zero();
  if (num_ephemeral_.load(std::memory_order_relaxed) == 0 || RetryScope::current(this) != nullptr) {
    return timeout;
  }
  if (timeout == Duration::zero()) {
    timeout = communicator.timeout();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& ephemeral : ephemeral_timeouts_) {
    if (ephemeral.first == nullptr || !ephemeral.first->done()) {
      timeout += ephemeral.extra;
    }
  }
  return timeout;
}

void Backend::note_ephemeral(const std::shared_ptr<Op>& op) {
  if (num_ephemeral_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto& all = ephemeral_timeouts_;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const auto& e) { return e.first != nullptr && e.first->done(); }),
            all.end());
  for (auto& ephemeral : all) {
    if (ephemeral.first == nullptr) {
      ephemeral.first = op;
    }
  }
  num_ephemeral_ = static_cast<int>(all.size());
}

uint64_t Backend::getSequenceNumberForGroup() { return communicator()->sequence_number(); }

// Failure

Status Backend::failure() const { return communicator()->failure(); }

::c10d::ErrorType Backend::getError() {
  switch (failure().code) {
    case Code::Ok:
      return ::c10d::ErrorType::SUCCESS;
    case Code::Timeout:
      return ::c10d::ErrorType::TIMEOUT;
    case Code::PeerLost:
      return ::c10d::ErrorType::REMOTE_ERROR;
    default:
      return ::c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() { abort("rank " + std::to_string(current_rank_) + " aborted the group"); }

void Backend::abort(const std::string& why) {
  if (is_shut_down()) {
    return;
  }
  const auto communicator = this->communicator();
  ++num_aborts_;
  hooks_->report_abort();
  communicator->abort({Code::Aborted, why});
  abort_coalescing();
}

void Backend::shutdown() {
  leave();
  wait_for_flight_dumps(kPatience);  // of this group's failure, perhaps
}

void Backend::leave() {
  std::shared_ptr<Communicator> communicator;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    communicator = std::move(communicator_);
    communicator_ = nullptr;
  }
  if (communicator != nullptr && fork_count_ != fork_count()) {
    // Its thread exists in the parent only, and its peers are the parent's: leave it alone.
    static_cast<void>(new std::shared_ptr<Communicator>(std::move(communicator)));
  }
  // What is in flight ends now; who waits for it holds the communicator. Peers hear of the rest
  // when that is gone: they may still be in an op that is done here.
  if (communicator != nullptr) {
    ++num_aborts_;
    communicator->leave();
  }
}

bool Backend::is_shut_down() const {
  hold_if_exiting();
  std::lock_guard<std::mutex> lock(mutex_);
  return communicator_ == nullptr;
}

// Hooks

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) {
  std::lock_guard<std::mutex> lock(hooks_->mutex);
  TORCH_CHECK(hooks_->on_completion == nullptr, "the group has a completion hook already");
  onCompletionHook_ = hook;  // what hasHooks() asks
  hooks_->on_completion = std::move(hook);
  hooks_->any = true;
}

// Bounded by the deadlines of the ops.
void Backend::waitForPendingWorks() {
  std::unique_lock<std::mutex> lock(hooks_->mutex);
  hooks_->cv.wait(lock, [this] { return hooks_->num_pending == 0; });
}

void Backend::call_hooks(const std::shared_ptr<Op>& op, ::c10d::OpType type) {
  if (!hooks_->any.load(std::memory_order_acquire)) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(hooks_->mutex);
    ++hooks_->num_pending;
  }
  op->on_done([op, type, hooks = hooks_] {
    run_on_future_thread([op, type, hooks] {
      std::lock_guard<std::mutex> one_at_a_time(hooks->running);
      if (!op->status().ok()) {
        hooks->report_abort();
      }
      if (hooks->on_completion) {
        hooks->on_completion(std::make_shared<::c10d::WorkInfo>(
            type, op->tag().seq & ~Tag::kPointToPoint, op->started_at(), op->finished_at(),
            op->finished_at() - op->started_at()));
      }
      std::lock_guard<std::mutex> lock(hooks->mutex);
      --hooks->num_pending;
      hooks->cv.notify_all();
    });
  });
}

// Other groups

c10::intrusive_ptr<::c10d::Backend> Backend::split(const StorePtr& store,
                                                   const std::vector<int>& ranks,
                                                   const c10::intrusive_ptr<BaseOptions>& opts) {
  const auto me = std::find(ranks.begin(), ranks.end(), current_rank_);
  if (me == ranks.end()) {
    return nullptr;
  }
  // torch up to 2.13 splits once per device type, with one object behind all of them.
  std::lock_guard<std::mutex> lock(children_mutex_);
  for (auto it = children_.begin(); it != children_.end();) {
    it = it->second.expired() ? children_.erase(it) : std::next(it);
  }
  auto& child =
      children_.try_emplace(opts->group_name, c10::intrusive_ptr<Backend>()).first->second;
  if (auto alive = child.lock(); alive != nullptr && !alive->is_shut_down()) {
    return alive;
  }
  auto options = options_->copy();
  options->timeout = opts->timeout;
  options->group_name = opts->group_name;
  options->group_desc = opts->group_desc;
  options->global_ranks_in_group = opts->global_ranks_in_group;
  auto made = c10::make_intrusive<Backend>(
      c10::make_intrusive<::c10d::PrefixStore>("split/" + opts->group_name, store),
      static_cast<int>(me - ranks.begin()), static_cast<int>(ranks.size()), options);
  child = c10::weak_intrusive_ptr<Backend>(made);
  return made;
}

c10::intrusive_ptr<::c10d::Backend> Backend::merge(const StorePtr& store,
                                                   const c10::intrusive_ptr<BaseOptions>& opts,
                                                   const int& rank, const int& size) {
  auto options = c10::make_intrusive<BackendOptions>(opts->timeout);
  options->group_name = opts->group_name;
  options->group_desc = opts->group_desc;
  return c10::make_intrusive<Backend>(store, rank, size, options);
}

// Membership

Status Backend::join(const Membership& membership, int rank, Duration timeout) {
  const Turn turn(recovery_, store_, Clock::now() + timeout);
  const BlockingCall blocking;
  before_joining();
  auto status = communicator()->rebuild(membership, rank, timeout);
  if (!status.ok()) {
    return status;
  }
  auto shared = std::make_shared<const Membership>(membership);
  turn.lineage()->joined(shared, rank);
  joined(std::move(shared));
  return status;
}

void Backend::before_joining() {
  abort_coalescing();
  drop_coalescing();
}

// The communicator has joined it.
void Backend::joined(std::shared_ptr<const Membership> membership) {
  {
    const auto rank = communicator()->rank();
    auto initial_ranks = initial_ranks_of(*membership);
    std::lock_guard<std::mutex> lock(mutex_);  // all at once: see RetryScope::callers
    current_rank_ = rank;
    current_size_ = static_cast<int>(membership->handles.size());
    current_uuid_ = membership->uuid;
#ifdef GPUMODE_C10D_MUTABLE_RANK
    rank_ = current_rank_;
    size_ = current_size_;
#endif
    initial_ranks_ = std::move(initial_ranks);
    membership_ = std::move(membership);
  }
  std::lock_guard<std::mutex> lock(hooks_->mutex);
  hooks_->abort_reported = false;
}

std::shared_ptr<const Membership> Backend::membership() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return membership_;
}

std::vector<std::string> Backend::members() const { return membership()->handles; }

std::vector<int> Backend::initial_ranks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return initial_ranks_;
}

std::vector<int> Backend::initial_ranks_of(const Membership& members) const {
  const auto communicator = this->communicator();
  std::vector<int> ranks;
  for (const auto& handle : members.handles) {
    ranks.push_back(communicator->initial_rank(handle));
  }
  return ranks;
}

std::string Backend::reconfigure_handle() const { return communicator()->handle(); }

Status Backend::rebuild(int64_t uuid, const std::vector<std::string>& handles,
                        std::chrono::milliseconds timeout) {
  const auto me = std::find(handles.begin(), handles.end(), reconfigure_handle());
  TORCH_CHECK_VALUE(me != handles.end(), "handles: the handle of this rank is not among them");
  auto sorted = handles;
  std::sort(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                    "handles: one of them is there twice");
  for (const auto& handle : handles) {
    throw_if_failed(check_handle(handle));
  }
  TORCH_CHECK_VALUE(uuid >= 0, "uuid: expected 0 or more, got ", uuid);
  TORCH_CHECK_VALUE(timeout.count() > 0, "timeout: expected a positive one, got ", timeout.count(),
                    " ms");
  return join({uuid, handles}, static_cast<int>(me - handles.begin()), to_duration(timeout));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
void Backend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  ephemeral_timeouts_.push_back({to_duration(timeout), nullptr});
  num_ephemeral_ = static_cast<int>(ephemeral_timeouts_.size());
}

::c10d::ReconfigureHandle Backend::get_reconfigure_handle() const { return reconfigure_handle(); }

// A set leaves the order of the ranks to us: handles sort in the order in which the ranks were.
Backend::WorkPtr Backend::reconfigure(const ::c10d::ReconfigureOptions& opts) {
  std::vector<std::string> handles;
  if (const auto* list = std::get_if<std::vector<std::string>>(&opts.handles)) {
    handles = *list;
  } else {
    const auto& set = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(set.begin(), set.end());
    std::sort(handles.begin(), handles.end());
  }
  auto status = rebuild(opts.uuid, handles, opts.timeout.value_or(options_->timeout));
  auto work = c10::make_intrusive<Work>(current_rank_, ::c10d::OpType::UNKNOWN,
                                        "gpumode:reconfigure", Tensors{}, Tensors{});
  work->start_done(std::move(status));
  return work;
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
void Backend::registerAbortHook(int64_t hook_id, ::c10d::AbortHook hook) {
  std::lock_guard<std::mutex> lock(hooks_->mutex);
  hooks_->on_abort[hook_id] = std::move(hook);
  hooks_->any = true;
}

void Backend::unregisterAbortHook(int64_t hook_id) {
  std::lock_guard<std::mutex> lock(hooks_->mutex);
  hooks_->on_abort.erase(hook_id);
}
#endif

}  // namespace gpumode
