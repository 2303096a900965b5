#include "host/collectives.h"
#include "host/exchange.h"

namespace gpumode::host {

std::unique_ptr<Task> make_gather(const Context& context, const OpDesc& op) {
  ExchangePlan plan(context.epoch.size());
  plan.uneven = true;
  plan.common = true;  // one reader: the whole slot is for it
  plan.out[op.root] = op.inputs[0];
  if (context.epoch.rank() == op.root) plan.in = op.outputs;
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
