#include "host/collectives.h"
#include "host/exchange.h"

namespace gpumode::host {

std::unique_ptr<Task> make_scatter(const Context& context, const OpDesc& op) {
  ExchangePlan plan(context.epoch.size());
  plan.uneven = true;
  if (context.epoch.rank() == op.root) plan.out = op.inputs;
  plan.in[op.root] = op.outputs[0];
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
