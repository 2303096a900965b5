#include "c10d/finishing_work.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "c10d/exit.h"

namespace gpumode {

using Future = c10::ivalue::Future;

FinishingWork::FinishingWork(int rank, ::c10d::OpType type, c10::intrusive_ptr<::c10d::Work> op,
                             std::vector<at::Tensor> outputs, std::function<void()> finish)
    : ::c10d::Work(rank, type),
      op_(std::move(op)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))),
      finish_(std::move(finish)) {}

c10::intrusive_ptr<FinishingWork> FinishingWork::start(int rank, ::c10d::OpType type,
                                                       c10::intrusive_ptr<::c10d::Work> op,
                                                       std::vector<at::Tensor> outputs,
                                                       std::function<void()> finish) {
  auto work = c10::make_intrusive<FinishingWork>(rank, type, std::move(op), std::move(outputs),
                                                 std::move(finish));
  work->op_->getFuture()->addCallback([work](Future& op) {
    auto error = op.exception_ptr();
    if (error == nullptr) {
      work->finish_once();
      error = work->error_;
    }
    if (error != nullptr) {
      work->future_->setError(error);
    } else {
      work->future_->markCompleted(c10::IValue(work->outputs_));
    }
  });
  return work;
}

void FinishingWork::finish_once() {
  std::lock_guard<std::mutex> lock(finish_mutex_);
  if (finish_ == nullptr) {
    return;
  }
  try {
    finish_();
  } catch (...) {
    error_ = std::current_exception();
  }
  finish_ = nullptr;
  finished_.store(true, std::memory_order_release);
}

bool FinishingWork::isCompleted() {
  return finished_.load(std::memory_order_acquire) || op_failed();
}

bool FinishingWork::isSuccess() const {
  return finished_.load(std::memory_order_acquire) && error_ == nullptr;
}

std::exception_ptr FinishingWork::exception() const {
  return finished_.load(std::memory_order_acquire) ? error_ : op_->exception();
}

std::vector<at::Tensor> FinishingWork::result() {
  TORCH_CHECK(isCompleted(), "the result of a work is known when it is done; wait for it first");
  return outputs_;
}

void FinishingWork::synchronize() { wait(kNoTimeout); }

bool FinishingWork::wait(std::chrono::milliseconds timeout) {
  ::c10d::unregister_work(c10::intrusive_ptr<::c10d::Work>::unsafe_reclaim_from_nonowning(this));
  const BlockingCall blocking;
  op_->wait(timeout);
  finish_once();
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
  return true;
}

}  // namespace gpumode
