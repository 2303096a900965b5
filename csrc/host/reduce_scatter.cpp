#include "host/collectives.h"
#include "host/exchange.h"

namespace gpumode::host {

std::unique_ptr<Task> make_reduce_scatter(const Context& context, const OpDesc& op) {
  ExchangePlan plan(context.epoch.size());
  plan.out = op.inputs;
  for (Buffer& in : plan.in) in = op.outputs[0];
  plan.reduction = Reduction{op.reduce_op, op.dtype, op.factor};
  plan.result = static_cast<std::byte*>(op.outputs[0].data);
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
