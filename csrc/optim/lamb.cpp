#include "optim/lamb.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kLamb = {"lamb",
                    {"lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction",
                     "grad_averaging", "decoupled", "always_adapts", "maximize"},
                    2,
                    {pass_of<LambMoments>(), pass_of<LambApply>()},
                    nullptr};

}  // namespace gpumode::optim
