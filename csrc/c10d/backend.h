#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "c10d/flight_dump.h"
#include "c10d/flight_recorder.h"
#include "c10d/options.h"
#include "c10d/recovery.h"
#include "c10d/work.h"
#include "core/communicator.h"

namespace gpumode {

// torch's Backend on one Communicator. The constructor opens the group together with all other
// ranks, unless options->enable_reconfigure leaves that to reconfigure().
//
//   backend.cpp                 what it is made of, running an op, coalescing
//   backend_collectives.cpp     broadcast, all_reduce, reduce, all_to_all, barrier
//   backend_gather_scatter.cpp  all_gather, reduce_scatter, gather, scatter
//   backend_sparse.cpp          all_reduce of sparse tensors
//   backend_p2p.cpp             send, recv, recvAnysource
//   backend_lifecycle.cpp       timeouts, abort, shutdown, split, reconfigure, hooks
//   backend_records.cpp         what is remembered of an op: flight record, profiler
//   recovery.cpp                retried ops
class Backend : public ::c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
  using StorePtr = c10::intrusive_ptr<::c10d::Store>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using BaseOptions = ::c10d::Backend::Options;

  Backend(StorePtr store, int rank, int size, c10::intrusive_ptr<BackendOptions> options);
  ~Backend() override;

  const std::string getBackendName() const override { return "gpumode"; }
  // The members' view, which reconfigure() changes; torch before 2.14 fixes the base class's.
  int current_rank() const { return current_rank_; }
  int current_size() const { return current_size_; }
  // Names the membership that was joined last; -1 before the first.
  int64_t current_uuid() const { return current_uuid_; }
  // Their handles, by rank; empty before the first.
  std::vector<std::string> members() const;
  // The ranks that they had when the group was made.
  std::vector<int> initial_ranks() const;
  std::shared_ptr<const Membership> membership() const;

  // Collectives. The names with an underscore and the like are torch's old ones for *_single.
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;
#ifdef GPUMODE_C10D_HAS_SINGLE_NAMES
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const ::c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const ::c10d::GatherOptions& opts) override;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const ::c10d::GatherOptions& opts) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const ::c10d::AllToAllOptions& opts) override;
#endif

  // Point to point.
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Ops of this thread between the two become one op with one work.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Whether another thread than this one is between the two.
  bool coalesces_elsewhere() const;

  // Lifecycle.
  c10::intrusive_ptr<BackendOptions> options() const { return options_->copy(); }
  c10::intrusive_ptr<BaseOptions> getBackendOptions() override { return options_->copy(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  Duration timeout() const { return communicator()->timeout(); }
  void setSequenceNumberForGroup() override {}  // always starts at 0, on every rank
  uint64_t getSequenceNumberForGroup() override;
  ::c10d::ErrorType getError() override;
  Status failure() const;
  void abort() override;
  void abort(const std::string& why);
  void shutdown() override;
  void leave();  // shutdown, but for the wait until a failure is on record
  // The parent's weak reference keeps a child from being destroyed when its last owner goes.
  void release_resources() override { shutdown(); }
  void enableCollectivesTiming() override {}  // every work knows its duration
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<::c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;

  uint64_t id() const { return id_; }  // within the process
  GroupFlightRecord flight_record() const;
  // A rebuild changes them, and only Python knows how: a global rank is one in the default group.
  void set_global_ranks(std::vector<uint64_t> ranks);

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<BaseOptions>& opts) override;
  c10::intrusive_ptr<::c10d::Backend> merge(const StorePtr& store,
                                            const c10::intrusive_ptr<BaseOptions>& opts,
                                            const int& rank, const int& size) override;

  // For a program that starts over: with those that are left, whoever they are.
  std::unique_ptr<Rebuild> begin_rebuild(std::chrono::milliseconds timeout,
                                         std::optional<int> min_size);

  std::string reconfigure_handle() const;
  // Joins the members named by `handles`, in the order of the ranks.
  Status rebuild(int64_t uuid, const std::vector<std::string>& handles,
                 std::chrono::milliseconds timeout);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  bool supportsReconfigure() const override { return true; }
  ::c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const ::c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t hook_id, ::c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif

 private:
  // One call of torch's, checked and described.
  struct Call {
    ::c10d::OpType type;
    const char* title;  // in torch.profiler
    std::vector<OpDesc> parts;
    Tensors inputs;   // read
    Tensors outputs;  // written; the result of the work
    std::chrono::milliseconds timeout = ::c10d::kUnsetTimeout;
    bool async_op = true;
    bool patient = false;  // see SubmitOptions
    uint32_t attempt = 0;
  };
  using Descriptions = c10::SmallVector<CallDescription, 1>;
  struct Coalescing {
    std::vector<Call> calls;
    std::vector<c10::intrusive_ptr<Work>> works;
    std::exception_ptr refused;  // the first call that was wrong; endCoalescing throws it
    bool aborted = false;
    bool dropped = false;  // by an abort, one call at least

    void abort();
  };
  struct EphemeralTimeout {
    Duration extra;
    std::shared_ptr<Op> first;  // the first op submitted under it
  };
  struct Keepalive;
  struct Hooks;

  void open(const StorePtr& store);
  std::shared_ptr<Communicator> communicator() const;
  bool is_shut_down() const;
  Status join(const Membership& membership, int rank, Duration timeout);
  void before_joining();
  void joined(std::shared_ptr<const Membership> membership);

  WorkPtr run(Call call);
  WorkPtr run_retried(Call call, RetryScope* scope);
  std::vector<int> initial_ranks_of(const Membership& members) const;
  std::shared_ptr<Op> submit(Communicator& communicator, Call call, Descriptions descriptions);
  std::shared_ptr<Op> submit_profiled(Communicator& communicator, Call call,
                                      Descriptions descriptions);
  // Nothing if nobody records it.
  Descriptions describe(c10::ArrayRef<Call> calls) const;
  Duration timeout_of(const Call& call, const Communicator& communicator) const;
  void note_ephemeral(const std::shared_ptr<Op>& op);
  void call_hooks(const std::shared_ptr<Op>& op, ::c10d::OpType type);

  // This thread's, or null. With the lock held.
  Coalescing* open_coalescing();
  // Forgets what this thread has collected; torch leaves it behind when an exception ends a block.
  void drop_coalescing();
  // What every thread has collected, and will collect until it ends its block, fails.
  void abort_coalescing();
  // run(describe()), except that within a block endCoalescing throws what `describe` throws: torch
  // ends a block properly only if none of its calls throws.
  template <class Describe>
  WorkPtr run_or_refuse(Describe describe);
  void refuse(std::exception_ptr error);
  void check_self(int peer, const char* problem);
  WorkPtr aborted_work() const;

  // Descriptions that several virtuals share.
  Call all_gather_call(const at::Tensor& output, const at::Tensor& input) const;
  Call reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                           const ::c10d::ReduceOp& op) const;
  static Call coalesce(std::vector<Call> calls, ::c10d::OpType type, const char* title);

  const c10::intrusive_ptr<BackendOptions> options_;
  const std::shared_ptr<Hooks> hooks_;
  const StorePtr store_;
  const std::shared_ptr<RecoveryState> recovery_ = std::make_shared<RecoveryState>();
  const int fork_count_;
  const uint64_t id_;
  FlightRecorder recorder_;
  std::atomic<int> current_rank_, current_size_;
  std::atomic<int64_t> current_uuid_{-1};
  std::atomic<uint64_t> num_aborts_{0};

  mutable std::mutex mutex_;                    // guards what follows
  std::shared_ptr<Communicator> communicator_;  // null after shutdown
  std::map<std::thread::id, Coalescing> coalescing_;
  std::vector<EphemeralTimeout> ephemeral_timeouts_;
  std::shared_ptr<const Membership> membership_ = std::make_shared<Membership>();
  std::vector<int> initial_ranks_;  // of its members
  std::vector<uint64_t> global_ranks_;
  std::atomic<int> num_coalescing_{0}, num_ephemeral_{0};  // also read without the lock

  std::mutex children_mutex_;                                         // held while a child opens
  std::map<std::string, c10::weak_intrusive_ptr<Backend>> children_;  // made by split, by name
};

// Of every group of this process; of several with one name, the newest.
std::vector<GroupFlightRecord> flight_records();

// How long the end of a group or of the process waits for what runs in other threads.
constexpr std::chrono::milliseconds kPatience{2000};

// Shuts down every backend of this process and ends the threads that complete futures; at exit.
void shutdown_all();

}  // namespace gpumode
