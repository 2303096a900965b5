#include <utility>

#include "c10d/backend.h"
#include "c10d/tensors.h"

// all_gather, reduce_scatter, gather and scatter in all of their forms. What a rank does not use (a
// non-root's outputs of gather) is not looked at.
namespace gpumode {

using OpType = ::c10d::OpType;

// all_gather

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const ::c10d::AllgatherOptions& opts) {
  const auto& input = only(inputs, "input");
  const auto& list = only(outputs, "output");
  check_tensor_per_rank(list, current_size_, current_rank_, input, "output");
  auto op = moving_op(Collective::AllGather, input);
  op.inputs = {buffer(input)};
  op.outputs = buffers(list);
  check_overlap(op, current_rank_, "output");
  return run({OpType::ALLGATHER,
              "gpumode:all_gather",
              {std::move(op)},
              {input},
              list,
              opts.timeout,
              opts.asyncOp});
}

Backend::Call Backend::all_gather_call(const at::Tensor& output, const at::Tensor& input) const {
  check_tensor(output, "output");
  check_tensor(input, "input");
  check_same_dtype(output, input, "output");
  check_same_format(output, input, "output");
  check_numel(output, input.numel() * current_size_, "output");
  auto op = moving_op(Collective::AllGather, input);
  op.inputs = {buffer(input)};
  op.outputs = pieces(output, current_size_, "output");
  check_overlap(op, current_rank_, "output");
  return {OpType::_ALLGATHER_BASE,
          "gpumode:all_gather_into_tensor",
          {std::move(op)},
          {input},
          {output}};
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::AllgatherOptions& opts) {
  auto call = all_gather_call(output, input);
  call.timeout = opts.timeout;
  call.async_op = opts.asyncOp;
  return run(std::move(call));
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  check_tensors(inputs, "input");
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(current_size_),
                    "output: expected a list of tensors for each of ", current_size_,
                    " ranks, got ", outputs.size());
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors gathered;
    for (const auto& list : outputs) {
      check_length(list.size(), inputs.size(), "output");
      gathered.push_back(list[i]);
    }
    check_tensor_per_rank(gathered, current_size_, current_rank_, inputs[i], "output");
    auto op = moving_op(Collective::AllGather, inputs[i]);
    op.inputs = {buffer(inputs[i])};
    op.outputs = buffers(gathered);
    check_overlap(op, current_rank_, "output");
    calls.push_back({OpType::ALLGATHER,
                     "",
                     {std::move(op)},
                     {inputs[i]},
                     std::move(gathered),
                     opts.timeout,
                     opts.asyncOp});
  }
  return run(
      coalesce(std::move(calls), OpType::ALLGATHER_COALESCED, "gpumode:all_gather_coalesced"));
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::AllgatherOptions& opts) {
  check_tensors(inputs, "inputs");
  check_length(outputs.size(), inputs.size(), "outputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(all_gather_call(outputs[i], inputs[i]));
    calls.back().timeout = opts.timeout;
    calls.back().async_op = opts.asyncOp;
  }
  return run(
      coalesce(std::move(calls), OpType::COALESCED, "gpumode:all_gather_into_tensor_coalesced"));
}

// reduce_scatter

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const ::c10d::ReduceScatterOptions& opts) {
  const auto& output = only(outputs, "output");
  const auto& list = only(inputs, "input");
  check_tensor_per_rank(list, current_size_, current_rank_, output, "input");
  auto op = reducing_op(Collective::ReduceScatter, opts.reduceOp, output, "output");
  op.inputs = buffers(list);
  op.outputs = {buffer(output)};
  check_overlap(op, current_rank_, "output");
  return run({OpType::REDUCE_SCATTER,
              "gpumode:reduce_scatter",
              {std::move(op)},
              list,
              {output},
              opts.timeout,
              opts.asyncOp});
}

Backend::Call Backend::reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                                           const ::c10d::ReduceOp& reduce_op) const {
  check_tensor(output, "output");
  check_tensor(input, "input");
  check_same_dtype(output, input, "output");
  check_same_format(output, input, "output");
  check_numel(input, output.numel() * current_size_, "input");
  auto op = reducing_op(Collective::ReduceScatter, reduce_op, input, "input");
  op.inputs = pieces(input, current_size_, "input");
  op.outputs = {buffer(output)};
  check_overlap(op, current_rank_, "output");
  return {OpType::_REDUCE_SCATTER_BASE,
          "gpumode:reduce_scatter_tensor",
          {std::move(op)},
          {input},
          {output}};
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::ReduceScatterOptions& opts) {
  auto call = reduce_scatter_call(output, input, opts.reduceOp);
  call.timeout = opts.timeout;
  call.async_op = opts.asyncOp;
  return run(std::move(call));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) {
  check_tensors(inputs, "inputs");
  check_length(outputs.size(), inputs.size(), "outputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    calls.push_back(reduce_scatter_call(outputs[i], inputs[i], opts.reduceOp));
    calls.back().timeout = opts.timeout;
    calls.back().async_op = opts.asyncOp;
  }
  return run(
      coalesce(std::move(calls), OpType::COALESCED, "gpumode:reduce_scatter_tensor_coalesced"));
}

// gather, scatter

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const ::c10d::GatherOptions& opts) {
  const auto& input = only(inputs, "input");
  auto op = moving_op(Collective::Gather, input);
  op.root = check_rank(opts.rootRank, current_size_, "dst");
  op.inputs = {buffer(input)};
  Tensors list;
  if (op.root == current_rank_) {
    list = only(outputs, "gather_list");
    check_tensor_per_rank(list, current_size_, current_rank_, input, "gather_list");
    op.outputs = buffers(list);
    check_overlap(op, current_rank_, "gather_list");
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "gather_list: expected none on a rank that is not dst");
  }
  return run({OpType::GATHER,
              "gpumode:gather",
              {std::move(op)},
              {input},
              std::move(list),
              opts.timeout,
              opts.asyncOp});
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const ::c10d::ScatterOptions& opts) {
  const auto& output = only(outputs, "tensor");
  auto op = moving_op(Collective::Scatter, output);
  op.root = check_rank(opts.rootRank, current_size_, "src");
  op.outputs = {buffer(output)};
  Tensors list;
  if (op.root == current_rank_) {
    list = only(inputs, "scatter_list");
    check_tensor_per_rank(list, current_size_, current_rank_, output, "scatter_list");
    op.inputs = buffers(list);
    check_overlap(op, current_rank_, "tensor");
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "scatter_list: expected none on a rank that is not src");
  }
  return run({OpType::SCATTER,
              "gpumode:scatter",
              {std::move(op)},
              std::move(list),
              {output},
              opts.timeout,
              opts.asyncOp});
}

#ifdef GPUMODE_C10D_HAS_SINGLE_NAMES
// The base class forwards each old name and its new one to each other, guarded by a flag per thread
// that a wrapping backend trips: both are overridden.

Backend::WorkPtr Backend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                            const ::c10d::AllgatherOptions& opts) {
  return _allgather_base(output, input, opts);
}

Backend::WorkPtr Backend::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

Backend::WorkPtr Backend::gather_single(at::Tensor& output, at::Tensor& input,
                                        const ::c10d::GatherOptions& opts) {
  check_tensor(input, "input");
  auto op = moving_op(Collective::Gather, input);
  op.root = check_rank(opts.rootRank, current_size_, "dst");
  op.inputs = {buffer(input)};
  Tensors outputs;
  if (op.root == current_rank_) {
    check_tensor(output, "output");
    check_same_dtype(output, input, "output");
    check_same_format(output, input, "output");
    check_numel(output, input.numel() * current_size_, "output");
    op.outputs = pieces(output, current_size_, "output");
    check_overlap(op, current_rank_, "output");
    outputs = {output};
  }
  return run({OpType::GATHER,
              "gpumode:gather_single",
              {std::move(op)},
              {input},
              std::move(outputs),
              opts.timeout,
              opts.asyncOp});
}

Backend::WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                             const ::c10d::GatherOptions& opts) {
  return gather_single(output, input, opts);
}

Backend::WorkPtr Backend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                const ::c10d::ReduceScatterOptions& opts) {
  return _reduce_scatter_base(output, input, opts);
}

Backend::WorkPtr Backend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}
#endif

}  // namespace gpumode
