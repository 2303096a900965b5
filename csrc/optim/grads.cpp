#include "optim/grads.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Pass kGradNorm = pass_of<GradNorm>();
const Rule kGrads = {"grads", {}, 0, {pass_of<GradScale>()}, nullptr};

}  // namespace gpumode::optim
