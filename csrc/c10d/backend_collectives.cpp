#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "c10d/backend.h"
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

Backend::WorkPtr Backend::allreduce_sparse(Tensors&, const ::c10d::AllreduceOptions&) {
  TORCH_CHECK_VALUE(false, "tensors: expected dense ones, got sparse; call .to_dense() first");
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

// Every barrier names the ranks that did not come, so this one only waits.
void Backend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  barrier(opts)->wait(kNoTimeout);
}

}  // namespace gpumode
