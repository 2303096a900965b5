#include "c10d/backend.h"

#include <algorithm>
#include <set>
#include <utility>

#include "c10d/backend_state.h"
#include "c10d/bootstrap.h"
#include "c10d/engine_choice.h"
#include "c10d/exceptions.h"
#include "c10d/fork.h"

namespace gpumode {
namespace {

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
      fork_count_(fork_count()),
      current_rank_(rank),
      current_size_(size) {
  TORCH_CHECK_VALUE(size > 0, "size: expected a positive number of ranks, got ", size);
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "rank: expected a rank in [0, ", size, "), got ",
                    rank);
  TORCH_CHECK_VALUE(options_->timeout.count() > 0, "timeout: expected a positive one, got ",
                    options_->timeout.count(), " ms");
  Communicator::Options communicator_options;
  communicator_options.timeout = to_duration(options_->timeout);
  communicator_ =
      std::make_shared<Communicator>(choose_engine(rank, options_->spin), communicator_options);
  if (!options_->enable_reconfigure) {
    open(store);
  }
  std::lock_guard<std::mutex> lock(live_mutex);
  live_backends().insert(this);
}

Backend::~Backend() {
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    live_backends().erase(this);
  }
  shutdown();
}

void Backend::open(const StorePtr& store) {
  const auto started = std::chrono::steady_clock::now();
  Bootstrap bootstrap(store, current_rank_, current_size_);
  const auto membership = bootstrap.exchange(communicator_->handle(), options_->timeout);
  const auto left = to_duration(options_->timeout) - (std::chrono::steady_clock::now() - started);
  throw_if_failed(
      join(membership, current_rank_, std::max<Duration>(left, std::chrono::milliseconds(1))));
  bootstrap.clean_up();
}

std::shared_ptr<Communicator> Backend::communicator() const {
  TORCH_CHECK(fork_count_ == fork_count(),
              "a gpumode group cannot be used in a forked child of the process that made it");
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(communicator_ != nullptr, "this gpumode group has been shut down");
  return communicator_;
}

Backend::WorkPtr Backend::run(Call call) {
  auto work =
      c10::make_intrusive<Work>(current_rank_, call.type, call.title, call.inputs, call.outputs);
  const auto type = call.type;
  const auto communicator = this->communicator();
  if (num_coalescing_.load(std::memory_order_relaxed) != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = coalescing_.find(std::this_thread::get_id());
    if (it != coalescing_.end()) {
      it->second.calls.push_back(std::move(call));
      it->second.works.push_back(work);
      return work;
    }
  }
  auto op = submit(*communicator, std::move(call));
  call_hooks(op, type);
  work->start(communicator, std::move(op));
  return work;
}

std::shared_ptr<Op> Backend::submit(Communicator& communicator, Call call) {
  SubmitOptions options;
  options.timeout = timeout_of(call, communicator);
  options.keepalive = std::make_shared<Keepalive>(call);
  options.blocking = !call.async_op;
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

// torch ends no coalescing that an exception left. Its ops would otherwise swallow the next ones.
void Backend::startCoalescing() {
  drop_coalescing(/*all_threads=*/false);
  std::lock_guard<std::mutex> lock(mutex_);
  coalescing_[std::this_thread::get_id()];
  num_coalescing_ = static_cast<int>(coalescing_.size());
}

void Backend::drop_coalescing(bool all_threads) {
  std::map<std::thread::id, Coalescing> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (all_threads) {
      dropped.swap(coalescing_);
    } else if (auto node = coalescing_.extract(std::this_thread::get_id())) {
      dropped.insert(std::move(node));
    }
    num_coalescing_ = static_cast<int>(coalescing_.size());
  }
  for (const auto& [thread, coalescing] : dropped) {
    for (const auto& work : coalescing.works) {
      work->start_done({Code::Aborted, "the ops that it was to be coalesced with never ran"});
    }
  }
}

Backend::WorkPtr Backend::endCoalescing() {
  Coalescing ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = coalescing_.find(std::this_thread::get_id());
    TORCH_CHECK(
        it != coalescing_.end(),
        "endCoalescing was called without startCoalescing, or the group was aborted between");
    ended = std::move(it->second);
    coalescing_.erase(it);
    num_coalescing_ = static_cast<int>(coalescing_.size());
  }
  if (ended.calls.empty()) {
    return nullptr;
  }
  auto call = coalesce(std::move(ended.calls), ::c10d::OpType::COALESCED, "gpumode:coalesced");
  const bool p2p = is_p2p(call.parts[0].collective);
  for (const auto& part : call.parts) {
    TORCH_CHECK_VALUE(is_p2p(part.collective) == p2p,
                      "a coalesced group holds either collectives or sends and receives");
  }
  auto work =
      c10::make_intrusive<Work>(current_rank_, call.type, call.title, call.inputs, call.outputs);
  const auto communicator = this->communicator();
  auto op = submit(*communicator, std::move(call));
  call_hooks(op, ::c10d::OpType::COALESCED);
  for (const auto& part : ended.works) {
    part->start(communicator, op);
  }
  work->start(communicator, std::move(op));
  return work;
}

void shutdown_all() {
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (auto* backend : live_backends()) {
      backend->shutdown();
    }
  }
  stop_future_thread(std::chrono::seconds(2));
}

}  // namespace gpumode
