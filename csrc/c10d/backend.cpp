#include "c10d/backend.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "c10d/backend_state.h"
#include "c10d/bootstrap.h"
#include "c10d/engine_choice.h"
#include "c10d/exceptions.h"
#include "c10d/exit.h"
#include "c10d/fork.h"

namespace gpumode {
namespace {

std::atomic<uint64_t> num_backends{0};
std::mutex live_mutex;

std::set<Backend*>& live_backends() {
  static auto* backends = new std::set<Backend*>();  // used during exit
  return *backends;
}

}  // namespace

Backend::Backend(StorePtr store, int rank, int size, c10::intrusive_ptr<BackendOptions> options)
    : ::c10d::Backend(rank, size),
      options_(std::move(options)),
      hooks_(std::make_shared<Hooks>()),
      store_(std::move(store)),
      fork_count_(fork_count()),
      id_(num_backends++),
      recorder_(options_->flight_record),
      current_rank_(rank),
      current_size_(size),
      global_ranks_(options_->global_ranks_in_group) {
  TORCH_CHECK_VALUE(size > 0, "size: expected a positive number of ranks, got ", size);
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "rank: expected a rank in [0, ", size, "), got ",
                    rank);
  TORCH_CHECK_VALUE(options_->timeout.count() > 0, "timeout: expected a positive one, got ",
                    options_->timeout.count(), " ms");
  Communicator::Options communicator_options;
  communicator_options.timeout = to_duration(options_->timeout);
  communicator_options.on_failure = [records = recorder_.enabled()](const Status& why) {
    // Of a death there is nothing to find out, and the survivors are in a hurry.
    if (records && why.code != Code::PeerLost) {
      dump_flight_records_soon(&flight_records);
    }
  };
  communicator_ =
      std::make_shared<Communicator>(choose_engine(rank, options_->spin), communicator_options);
  if (!options_->enable_reconfigure) {
    open(store_);
  }
  static const bool registered = [] {
    survive_fork(live_mutex, [] {});
    return true;
  }();
  static_cast<void>(registered);
  std::lock_guard<std::mutex> lock(live_mutex);
  live_backends().insert(this);
}

Backend::~Backend() {
  leave();  // and no more: whoever drops the last reference may hold the GIL
  std::lock_guard<std::mutex> lock(live_mutex);
  live_backends().erase(this);
}

void Backend::open(const StorePtr& store) {
  const auto started = std::chrono::steady_clock::now();
  Bootstrap bootstrap(store, current_rank_, current_size_, options_->timeout);
  const auto membership = bootstrap.exchange(communicator_->handle());
  const auto left = to_duration(options_->timeout) - (std::chrono::steady_clock::now() - started);
  throw_if_failed(
      join(membership, current_rank_, std::max<Duration>(left, std::chrono::milliseconds(1))));
  bootstrap.clean_up();
}

std::shared_ptr<Communicator> Backend::communicator() const {
  TORCH_CHECK(fork_count_ == fork_count(),
              "a gpumode group cannot be used in a forked child of the process that made it");
  hold_if_exiting();
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(communicator_ != nullptr, "this gpumode group has been shut down");
  return communicator_;
}

Backend::WorkPtr Backend::aborted_work() const {
  auto work =
      c10::make_intrusive<Work>(current_rank_, ::c10d::OpType::COALESCED, "", Tensors{}, Tensors{});
  work->start_done({Code::Aborted, "the group was aborted while ops were coalesced"});
  return work;
}

void Backend::refuse(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto* coalescing = open_coalescing();
  if (coalescing == nullptr) {
    std::rethrow_exception(error);
  }
  if (coalescing->refused == nullptr) {
    coalescing->refused = std::move(error);
  }
}

Backend::WorkPtr Backend::run(Call call) {
  if (auto* scope = RetryScope::current(this)) {
    return run_retried(std::move(call), scope);
  }
  auto work =
      c10::make_intrusive<Work>(current_rank_, call.type, call.title, call.inputs, call.outputs);
  const auto type = call.type;
  const auto communicator = this->communicator();
  if (num_coalescing_.load(std::memory_order_relaxed) != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto* coalescing = open_coalescing()) {
      if (coalescing->aborted) {
        coalescing->dropped = true;
        return aborted_work();
      }
      coalescing->calls.push_back(std::move(call));
      coalescing->works.push_back(work);
      return work;
    }
  }
  auto descriptions = describe({&call, 1});
  auto op = submit_profiled(*communicator, std::move(call), std::move(descriptions));
  call_hooks(op, type);
  work->start(communicator, std::move(op));
  return work;
}

std::shared_ptr<Op> Backend::submit(Communicator& communicator, Call call,
                                    Descriptions descriptions) {
  SubmitOptions options;
  options.timeout = timeout_of(call, communicator);
  options.keepalive = std::make_shared<Keepalive>(call);
  options.blocking = !call.async_op;
  options.on_start = [&](const std::shared_ptr<Op>& op) {
    recorder_.record(op, current_rank_, std::move(descriptions));
  };
  options.patient = call.patient;
  options.attempt = call.attempt;
  std::optional<BlockingCall> blocking;
  if (options.blocking) {
    blocking.emplace();
  }
  auto op = communicator.submit(std::move(call.parts), std::move(options));
  note_ephemeral(op);
  return op;
}

Backend::Call Backend::coalesce(std::vector<Call> calls, ::c10d::OpType type, const char* title) {
  Call joined{type, title, {}, {}, {}, calls[0].timeout, false};
  for (auto& call : calls) {
    std::move(call.parts.begin(), call.parts.end(), std::back_inserter(joined.parts));
    std::move(call.inputs.begin(), call.inputs.end(), std::back_inserter(joined.inputs));
    std::move(call.outputs.begin(), call.outputs.end(), std::back_inserter(joined.outputs));
    joined.timeout = std::max(joined.timeout, call.timeout);
    joined.async_op = joined.async_op || call.async_op;
  }
  return joined;
}

void Backend::Coalescing::abort() {
  dropped = dropped || !works.empty();
  for (const auto& work : std::exchange(works, {})) {
    work->start_done({Code::Aborted, "the ops that it was to be coalesced with never ran"});
  }
  calls.clear();
  aborted = true;
}

Backend::Coalescing* Backend::open_coalescing() {
  const auto it = coalescing_.find(std::this_thread::get_id());
  return it != coalescing_.end() ? &it->second : nullptr;
}

void Backend::drop_coalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto node = coalescing_.extract(std::this_thread::get_id())) {
    node.mapped().abort();
  }
  num_coalescing_ = static_cast<int>(coalescing_.size());
}

void Backend::abort_coalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [thread, coalescing] : coalescing_) {
    coalescing.abort();
  }
}

bool Backend::coalesces_elsewhere() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return coalescing_.size() > coalescing_.count(std::this_thread::get_id());
}

void Backend::startCoalescing() {
  drop_coalescing();
  std::lock_guard<std::mutex> lock(mutex_);
  coalescing_[std::this_thread::get_id()];
  num_coalescing_ = static_cast<int>(coalescing_.size());
}

Backend::WorkPtr Backend::endCoalescing() {
  Coalescing ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto node = coalescing_.extract(std::this_thread::get_id());
    TORCH_CHECK(node, "endCoalescing was called without startCoalescing");
    ended = std::move(node.mapped());
    num_coalescing_ = static_cast<int>(coalescing_.size());
  }
  if (ended.aborted) {  // torch itself aborts groups in a block of no calls
    return ended.dropped ? aborted_work() : nullptr;
  }
  if (ended.refused != nullptr) {
    ended.abort();
    std::rethrow_exception(ended.refused);
  }
  if (ended.calls.empty()) {
    return nullptr;
  }
  auto descriptions = describe(ended.calls);
  auto call = coalesce(std::move(ended.calls), ::c10d::OpType::COALESCED, "gpumode:coalesced");
  const bool p2p = is_p2p(call.parts[0].collective);
  for (const auto& part : call.parts) {
    TORCH_CHECK_VALUE(is_p2p(part.collective) == p2p,
                      "a coalesced group holds either collectives or sends and receives");
  }
  auto work =
      c10::make_intrusive<Work>(current_rank_, call.type, call.title, call.inputs, call.outputs);
  const auto communicator = this->communicator();
  auto op = submit_profiled(*communicator, std::move(call), std::move(descriptions));
  call_hooks(op, ::c10d::OpType::COALESCED);
  for (const auto& part : ended.works) {
    part->start(communicator, op);
  }
  work->start(communicator, std::move(op));
  return work;
}

std::vector<GroupFlightRecord> flight_records() {
  std::lock_guard<std::mutex> lock(live_mutex);
  std::map<std::string, GroupFlightRecord> newest;  // one that is closed may still be kept alive
  for (const auto* backend : live_backends()) {
    auto record = backend->flight_record();
    auto& known = newest[record.name];
    if (known.rank < 0 || known.id < record.id) {
      known = std::move(record);
    }
  }
  std::vector<GroupFlightRecord> records;
  for (auto& [name, record] : newest) {
    records.push_back(std::move(record));
  }
  return records;
}

void shutdown_all() {
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (auto* backend : live_backends()) {
      backend->leave();
    }
  }
  wait_for_flight_dumps(kPatience);
  stop_future_threads(kPatience);
  hold_other_threads(kPatience);
}

}  // namespace gpumode
