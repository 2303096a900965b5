#include "optim/rmsprop.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kRmsprop = {"rmsprop",
                       {"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"},
                       3,
                       {pass_of<RmspropUpdate>()},
                       nullptr};

}  // namespace gpumode::optim
