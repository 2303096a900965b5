#pragma once

#include <memory>
#include <vector>

#include "c10d/torch_version.h"
#include "core/communicator.h"

namespace gpumode {

// One op as torch sees it. Thread-safe once started.
class Work : public ::c10d::Work {
 public:
  // `outputs` are what result() and the future give back. Until `start` the work waits for
  // endCoalescing and cannot be waited for.
  Work(int rank, ::c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs);

  void start(const std::shared_ptr<Communicator>& communicator, std::shared_ptr<Op> op);
  // A work that is done, with the status that it ended with; for reconfigure().
  void start_done(Status status);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::chrono::milliseconds getTimeout() const override;
#endif

 private:
  bool done() const;
  Status status() const;
  const Op& started_op() const;

  std::weak_ptr<Communicator> communicator_;  // the group's; it may be destroyed before the work
  std::shared_ptr<Op> op_;
  std::unique_ptr<Status> done_status_;  // instead of an op
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

}  // namespace gpumode
