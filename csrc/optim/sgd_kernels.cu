#include "optim/sgd.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<SgdUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
