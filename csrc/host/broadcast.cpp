#include "host/collectives.h"
#include "host/exchange.h"

namespace gpumode::host {

std::unique_ptr<Task> make_broadcast(const Context& context, const OpDesc& op) {
  ExchangePlan plan(context.epoch.size());
  plan.common = true;
  if (context.epoch.rank() == op.root) {
    for (Buffer& out : plan.out) out = op.outputs[0];
  } else {
    plan.in[op.root] = op.outputs[0];
  }
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
