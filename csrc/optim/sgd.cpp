#include "optim/sgd.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kSgd = {"sgd",
                   {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"},
                   1,
                   {pass_of<SgdUpdate>()},
                   nullptr};

}  // namespace gpumode::optim
