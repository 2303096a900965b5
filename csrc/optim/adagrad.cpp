#include "optim/adagrad.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kAdagrad = {"adagrad",
                       {"lr", "lr_decay", "eps", "weight_decay", "maximize"},
                       1,
                       {pass_of<AdagradUpdate>()},
                       nullptr};

}  // namespace gpumode::optim
