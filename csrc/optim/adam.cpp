#include "optim/adam.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kAdam = {
    "adam",
    {"lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize", "decoupled"},
    3,
    {pass_of<AdamUpdate>()},
    nullptr};

}  // namespace gpumode::optim
