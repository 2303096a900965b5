#include "optim/grads.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<GradNorm>(const Launch& launch, void* stream);
template Status launch<GradScale>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
