#include "c10d/work.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "c10d/exceptions.h"
#include "c10d/exit.h"
#include "c10d/futures.h"
#include "c10d/options.h"

namespace gpumode {
namespace {

using Future = c10::ivalue::Future;

void complete(Future& future, const Status& status, const std::vector<at::Tensor>& outputs) {
  if (status.ok()) {
    future.markCompleted(c10::IValue(outputs));
  } else {
    future.setError(to_exception(status));
  }
}

}  // namespace

Work::Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs)
    // The profiler shows the shapes of what an op works on.
    : ::c10d::Work(rank, type, title, inputs.empty() ? outputs : inputs),
      outputs_(std::move(outputs)) {}

void Work::start(const std::shared_ptr<Communicator>& communicator, std::shared_ptr<Op> op) {
  communicator_ = communicator;
  op_ = std::move(op);
  if (recordFunctionEndCallback_) {
    op_->on_done(std::exchange(recordFunctionEndCallback_, nullptr));
  }
}

void Work::start_done(Status status) {
  done_status_ = std::make_unique<Status>(std::move(status));
  if (recordFunctionEndCallback_) {
    std::exchange(recordFunctionEndCallback_, nullptr)();
  }
}

bool Work::done() const { return done_status_ != nullptr || (op_ != nullptr && op_->done()); }

// Valid once done.
Status Work::status() const { return done_status_ != nullptr ? *done_status_ : op_->status(); }

const Op& Work::started_op() const {
  TORCH_CHECK(op_ != nullptr,
              "this work has no op of its own: it is part of a coalesced group "
              "that has not ended, or the result of reconfigure()");
  return *op_;
}

bool Work::isCompleted() { return done(); }

bool Work::isSuccess() const { return done() && status().ok(); }

std::exception_ptr Work::exception() const {
  return done() && !status().ok() ? to_exception(status()) : nullptr;
}

int Work::sourceRank() const {
  TORCH_CHECK(done(), "the source rank of a receive is known when it is done");
  return started_op().source_rank();
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(done(), "the result of a work is known when it is done; wait for it first");
  return outputs_;
}

void Work::synchronize() { wait(kNoTimeout); }

bool Work::wait(std::chrono::milliseconds timeout) {
  ::c10d::unregister_work(c10::intrusive_ptr<::c10d::Work>::unsafe_reclaim_from_nonowning(this));
  if (!done()) {
    started_op();
    if (const auto communicator = communicator_.lock()) {
      const BlockingCall blocking;
      throw_if_failed(communicator->wait(op_, to_duration(timeout)));
      return true;
    }
    // A communicator ends what is in flight before it goes.
    TORCH_INTERNAL_ASSERT(op_->done());
  }
  throw_if_failed(status());
  return true;
}

void Work::abort() {
  if (const auto communicator = communicator_.lock(); communicator != nullptr && !done()) {
    communicator->abort({Code::Aborted, "Work.abort() was called"});
  }
}

c10::intrusive_ptr<Future> Work::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_ != nullptr) {
    return future_;
  }
  future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
  if (done()) {
    complete(*future_, status(), outputs_);
    return future_;
  }
  started_op();
  op_->on_done([op = op_, future = future_, outputs = outputs_]() mutable {
    run_on_future_thread(
        [op = std::move(op), future = std::move(future), outputs = std::move(outputs)] {
          complete(*future, op->status(), outputs);
        });
  });
  return future_;
}

float Work::getDuration() const {
  TORCH_CHECK(done(), "the duration of a work is known when it is done");
  const Op& op = started_op();
  return std::chrono::duration<float, std::milli>(op.finished_at() - op.started_at()).count();
}

uint64_t Work::getSequencenumber() const { return started_op().tag().seq & ~Tag::kPointToPoint; }

#ifdef C10D_BACKEND_HAS_RECONFIGURE
std::chrono::milliseconds Work::getTimeout() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(started_op().timeout());
}
#endif

}  // namespace gpumode
