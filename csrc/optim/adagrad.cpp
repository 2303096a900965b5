#include "optim/adagrad.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kAdagrad = {"adagrad",
                       {"lr", "lr_decay", "eps", "weight_decay", "maximize"},
                       1,
                       {run_pieces<AdagradUpdate>},
                       nullptr};

}  // namespace gpumode::optim
