#include "optim/adam.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<AdamUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
