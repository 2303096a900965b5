#include "host/collectives.h"
#include "host/exchange.h"
#include "host/two_phase.h"

namespace gpumode::host {

// As all_reduce, with one reader. A large one is shared out too, so that the root is not the only
// one that reduces.
std::unique_ptr<Task> make_reduce(const Context& context, const OpDesc& op) {
  const Buffer& buffer = op.outputs[0];
  const Buffer& input = op.inputs.empty() ? buffer : op.inputs[0];
  const Reduction reduction{op.reduce_op, op.dtype, op.factor};
  if (TwoPhase::pays(context.epoch, buffer.nbytes)) {
    return std::make_unique<TwoPhase>(context, reduction, input, buffer, op.root);
  }
  ExchangePlan plan(context.epoch.size());
  plan.common = true;
  plan.out[op.root] = input;
  plan.reduction = reduction;
  if (context.epoch.rank() == op.root) {
    for (Buffer& in : plan.in) in = buffer;
    plan.result = static_cast<std::byte*>(buffer.data);
  }
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
