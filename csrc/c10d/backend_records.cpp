#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <numeric>
#include <utility>

#include "c10d/backend.h"

namespace gpumode {

// Flight record

Backend::Descriptions Backend::describe(c10::ArrayRef<Call> calls) const {
  Descriptions descriptions;
  if (!recorder_.enabled()) {
    return descriptions;
  }
  for (const auto& call : calls) {
    auto& description = descriptions.emplace_back();
    description.title = call.title;
    if (!call.parts.empty() && is_p2p(call.parts[0].collective)) {
      description.peer = call.parts[0].peer;
    }
    description.inputs = TensorsDescription(call.inputs);
    description.outputs = TensorsDescription(call.outputs);
  }
  return descriptions;
}

GroupFlightRecord Backend::flight_record() const {
  GroupFlightRecord record;
  record.id = id_;
  record.name = options_->group_name;
  record.entries = recorder_.entries();
  if (!record.entries.empty()) {  // so torch has set it, on the thread of the first op
    record.desc = getGroupDesc();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  record.rank = current_rank_;
  record.global_ranks = global_ranks_;
  if (record.global_ranks.empty()) {  // the default group
    record.global_ranks.resize(static_cast<size_t>(current_size_));
    std::iota(record.global_ranks.begin(), record.global_ranks.end(), uint64_t{0});
  }
  record.failure = communicator_ != nullptr ? communicator_->failure() : Status();
  return record;
}

void Backend::set_global_ranks(std::vector<uint64_t> ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  global_ranks_ = std::move(ranks);
}

// torch.profiler

namespace {

int64_t total_numel(const std::vector<at::Tensor>& tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    total += tensor.numel();
  }
  return total;
}

}  // namespace

// submit, and what an observer such as the profiler wants to know of it: name, sizes, group.
std::shared_ptr<Op> Backend::submit_profiled(Communicator& communicator, Call call,
                                             Descriptions descriptions) {
  if (!at::hasCallbacks()) {
    return submit(communicator, std::move(call), std::move(descriptions));
  }
  const bool p2p = !call.parts.empty() && is_p2p(call.parts[0].collective);
  const auto seq =
      std::make_tuple(static_cast<int64_t>(communicator.sequence_number()) + (p2p ? 0 : 1), p2p);
  const auto group = std::make_tuple(options_->group_name, getGroupDesc());
  const std::string title = call.title;
  const auto& tensors = call.inputs.empty() ? call.outputs : call.inputs;
  const auto dtype = tensors.empty() ? at::kByte : tensors[0].scalar_type();
  const std::vector<int64_t> no_splits;
  RECORD_PARAM_COMMS_DATA(seq, group, call.inputs, call.outputs, current_rank_.load(),
                          title.substr(title.find(':') + 1), total_numel(call.inputs),
                          total_numel(call.outputs), dtype, no_splits, no_splits, -1, -1,
                          current_size_.load());
  return submit(communicator, std::move(call), std::move(descriptions));
}

}  // namespace gpumode
