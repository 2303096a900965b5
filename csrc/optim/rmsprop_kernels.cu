#include "optim/rmsprop.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<RmspropUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
