#include "host/collectives.h"
#include "host/exchange.h"

namespace gpumode::host {

std::unique_ptr<Task> make_all_to_all(const Context& context, const OpDesc& op) {
  ExchangePlan plan(context.epoch.size());
  plan.uneven = true;
  plan.out = op.inputs;
  plan.in = op.outputs;
  return std::make_unique<Exchange>(context, std::move(plan));
}

}  // namespace gpumode::host
