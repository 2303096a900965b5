#include "optim/novograd.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<NovogradUpdate>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
