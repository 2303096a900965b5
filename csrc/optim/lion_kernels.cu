#include "optim/lion.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<LionUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
