#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "c10d/backend.h"
#include "c10d/exceptions.h"
#include "c10d/tensors.h"

// Each virtual checks its arguments, describes the op and runs it.
namespace gpumode {

using OpType = ::c10d::OpType;

// broadcast, reduce, all_reduce

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const auto& tensor = only(tensors, "tensors");
  auto op = moving_op(Collective::Broadcast, tensor);
  op.root = check_rank(opts.rootRank, current_size_, "src");
  op.outputs = {buffer(tensor)};
  return run({OpType::BROADCAST,
              "gpumode:broadcast",
              {std::move(op)},
              {tensor},
              {tensor},
              opts.timeout,
              opts.asyncOp});
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  if (!tensors.empty() && tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  const auto& tensor = only(tensors, "tensors");
  auto op = reducing_op(Collective::AllReduce, opts.reduceOp, tensor, "tensors");
  op.outputs = {buffer(tensor)};
  return run({OpType::ALLREDUCE,
              "gpumode:all_reduce",
              {std::move(op)},
              {tensor},
              {tensor},
              opts.timeout,
              opts.asyncOp});
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const ::c10d::AllreduceCoalescedOptions& opts) {
  check_tensors(tensors, "tensors");
  std::vector<Call> calls;
  for (const auto& tensor : tensors) {
    auto op = reducing_op(Collective::AllReduce, opts.reduceOp, tensor, "tensors");
    op.outputs = {buffer(tensor)};
    calls.push_back(
        {OpType::ALLREDUCE, "", {std::move(op)}, {tensor}, {tensor}, opts.timeout, opts.asyncOp});
  }
  return run(
      coalesce(std::move(calls), OpType::ALLREDUCE_COALESCED, "gpumode:all_reduce_coalesced"));
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const auto& tensor = only(tensors, "tensors");
  auto op = reducing_op(Collective::Reduce, opts.reduceOp, tensor, "tensors");
  op.root = check_rank(opts.rootRank, current_size_, "dst");
  op.outputs = {buffer(tensor)};
  return run({OpType::REDUCE,
              "gpumode:reduce",
              {std::move(op)},
              {tensor},
              {tensor},
              opts.timeout,
              opts.asyncOp});
}

// all_to_all

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const ::c10d::AllToAllOptions& opts) {
  check_tensor(output, "output");
  check_tensor(input, "input");
  check_same_dtype(output, input, "output");
  auto op = moving_op(Collective::AllToAll, input);
  op.inputs = pieces(input, input_splits, current_size_, "input");
  op.outputs = pieces(output, output_splits, current_size_, "output");
  check_overlap(op, -1, "output");
  const auto me = static_cast<size_t>(current_rank_);
  TORCH_CHECK_VALUE(op.inputs[me].nbytes == op.outputs[me].nbytes,
                    "output: this rank sends itself ", op.inputs[me].nbytes, " bytes but expects ",
                    op.outputs[me].nbytes);
  return run({OpType::ALLTOALL_BASE,
              "gpumode:all_to_all_single",
              {std::move(op)},
              {input},
              {output},
              opts.timeout,
              opts.asyncOp});
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const ::c10d::AllToAllOptions& opts) {
  check_length(inputs.size(), static_cast<size_t>(current_size_), "input");
  const auto& mine = inputs[static_cast<size_t>(current_rank_)];
  check_tensor_per_rank(inputs, current_size_, current_rank_, mine, "input");
  check_tensor_per_rank(outputs, current_size_, current_rank_, mine, "output");
  auto op = moving_op(Collective::AllToAll, mine);
  op.inputs = buffers(inputs);
  op.outputs = buffers(outputs);
  check_overlap(op, -1, "output");
  return run({OpType::ALLTOALL,
              "gpumode:all_to_all",
              {std::move(op)},
              inputs,
              outputs,
              opts.timeout,
              opts.asyncOp});
}

#ifdef GPUMODE_C10D_HAS_SINGLE_NAMES
// The base class forwards each old name and its new one to each other, guarded by a flag per thread
// that a wrapping backend trips: both are overridden.
Backend::WorkPtr Backend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const ::c10d::AllToAllOptions& opts) {
  return alltoall_base(output, input, output_splits, input_splits, opts);
}
#endif

namespace {

// What is queued on the current CUDA stream comes before a barrier. Processes that never used CUDA
// are left alone.
void wait_for_current_cuda_stream() {
  const auto& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCUDA()) {
    return;
  }
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const auto device = cuda.getDevice();
  if (hooks.hasPrimaryContext(device.index())) {
    cuda.getStream(device).synchronize();
  }
}

}  // namespace

Backend::WorkPtr Backend::barrier(const ::c10d::BarrierOptions& opts) {
  wait_for_current_cuda_stream();
  OpDesc op;
  op.collective = Collective::Barrier;
  return run(
      {OpType::BARRIER, "gpumode:barrier", {std::move(op)}, {}, {}, opts.timeout, opts.asyncOp});
}

namespace {

// Says it in Gloo's words, which programs and people look for.
Status in_words_of_gloo(Status status, int rank, std::chrono::milliseconds timeout,
                        bool wait_all_ranks) {
  if (status.ranks.empty() || (status.code != Code::Timeout && status.code != Code::PeerLost)) {
    return status;
  }
  std::string names = "Rank " + std::to_string(status.ranks[0]);
  if (wait_all_ranks) {
    names = "Ranks " + c10::Join(", ", status.ranks);
  }
  const auto me = "Rank " + std::to_string(rank);
  const auto time = " in " + std::to_string(timeout.count()) + " ms";
  auto text = names + " failed to pass monitoredBarrier" + time;
  if (rank != 0) {
    text = me +
           " successfully reached monitoredBarrier, but received errors while waiting for "
           "send/recv from rank 0: " +
           text;
  } else if (status.code == Code::Timeout) {
    text += "; " + me + " timed out in monitoredBarrier";
  }
  status.message = text + " (" + status.message + ")";
  return status;
}

}  // namespace

// Every barrier knows the ranks that did not come.
void Backend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  wait_for_current_cuda_stream();
  const auto communicator = this->communicator();
  auto timeout = opts.timeout;
  if (timeout.count() < 0) {
    timeout = std::chrono::duration_cast<std::chrono::milliseconds>(communicator->timeout());
  }
  OpDesc part;
  part.collective = Collective::Barrier;
  Call call{OpType::BARRIER, "gpumode:barrier", {std::move(part)}, {}, {}};
  call.timeout = std::max(timeout, std::chrono::milliseconds(1));
  call.async_op = false;
  call.patient = wait_all_ranks;
  auto descriptions = describe({&call, 1});
  const auto op = submit_profiled(*communicator, std::move(call), std::move(descriptions));
  call_hooks(op, OpType::BARRIER);
  auto status = communicator->wait(op);
  if (op->tag().seq != 0) {  // else the group had failed before
    status = in_words_of_gloo(std::move(status), current_rank_, timeout, wait_all_ranks);
  }
  throw_if_failed(status);
}

}  // namespace gpumode
