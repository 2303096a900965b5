#include "optim/adagrad.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<AdagradUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
