#include "optim/lion.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kLion = {"lion",
                    {"lr", "beta1", "beta2", "weight_decay", "maximize"},
                    1,
                    {pass_of<LionUpdate>()},
                    nullptr};

}  // namespace gpumode::optim
