#include "optim/novograd.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kNovograd = {"novograd",
                        {"lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction",
                         "grad_averaging", "inside_moment", "init_zero", "maximize"},
                        1,
                        {kGradNorm, pass_of<NovogradUpdate>()},
                        NovogradUpdate<double>::next_scalar};

}  // namespace gpumode::optim
