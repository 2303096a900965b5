#include "host/collectives.h"

#include <cassert>

namespace gpumode::host {

std::unique_ptr<Task> make_collective(const Context& context, const OpDesc& op) {
  switch (op.collective) {
    case Collective::AllGather:
    case Collective::AllReduceSparse:
      return make_all_gather(context, op);
    case Collective::AllReduce:
      return make_all_reduce(context, op);
    case Collective::AllToAll:
      return make_all_to_all(context, op);
    case Collective::Barrier:
      return make_barrier(context, op);
    case Collective::Broadcast:
      return make_broadcast(context, op);
    case Collective::Gather:
      return make_gather(context, op);
    case Collective::Reduce:
      return make_reduce(context, op);
    case Collective::ReduceScatter:
      return make_reduce_scatter(context, op);
    case Collective::Scatter:
      return make_scatter(context, op);
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  assert(false && "point-to-point transfers are no collectives");
  return nullptr;
}

}  // namespace gpumode::host
