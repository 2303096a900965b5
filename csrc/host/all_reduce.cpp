#include "host/collectives.h"
#include "host/exchange.h"
#include "host/two_phase.h"

namespace gpumode::host {

// Small: everybody reads everybody's input and reduces it alone, in rank order, which gives
// everybody the same bits after one exchange. Large: each rank reduces one shard.
std::unique_ptr<Task> make_all_reduce(const Context& context, const OpDesc& op) {
  const Buffer& buffer = op.outputs[0];
  const Buffer& input = op.inputs.empty() ? buffer : op.inputs[0];
  const Reduction reduction{op.reduce_op, op.dtype, op.factor};
  if (TwoPhase::pays(context.epoch, buffer.nbytes)) {
    return std::make_unique<TwoPhase>(context, reduction, input, buffer);
  }
  ExchangePlan plan(context.epoch.size());
  plan.common = true;
  for (Buffer& out : plan.out) out = input;
  plan.in = plan.out;
  plan.reduction = reduction;
  plan.result = static_cast<std::byte*>(buffer.data);
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
