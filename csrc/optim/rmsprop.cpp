#include "optim/rmsprop.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kRmsprop = {"rmsprop",
                       {"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"},
                       3,
                       {run_pieces<RmspropUpdate>},
                       nullptr};

}  // namespace gpumode::optim
