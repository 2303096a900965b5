#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "c10d/work.h"

namespace gpumode {

// A work whose result this rank computes by itself from what an op has brought. It does so once,
// on the thread that completes futures or on one that waits, whichever comes first: never on a
// communicator's thread, since what it lets go of may need the GIL.
class FinishingWork : public ::c10d::Work {
 public:
  // When `op` has succeeded, `finish` computes `outputs`.
  static c10::intrusive_ptr<FinishingWork> start(int rank, ::c10d::OpType type,
                                                 c10::intrusive_ptr<::c10d::Work> op,
                                                 std::vector<at::Tensor> outputs,
                                                 std::function<void()> finish);
  FinishingWork(int rank, ::c10d::OpType type, c10::intrusive_ptr<::c10d::Work> op,
                std::vector<at::Tensor> outputs, std::function<void()> finish);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { op_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  float getDuration() const override { return op_->getDuration(); }
  uint64_t getSequencenumber() const override { return op_->getSequencenumber(); }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::chrono::milliseconds getTimeout() const override { return op_->getTimeout(); }
#endif

 private:
  bool op_failed() const { return op_->isCompleted() && !op_->isSuccess(); }
  void finish_once();

  const c10::intrusive_ptr<::c10d::Work> op_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex finish_mutex_;
  std::function<void()> finish_;  // null once it has run; guarded by finish_mutex_
  std::exception_ptr error_;      // what it threw; valid once finished
  std::atomic<bool> finished_{false};
};

}  // namespace gpumode
