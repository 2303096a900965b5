#include "optim/lamb.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<LambMoments>(const Launch& launch, void* stream);
template Status launch<LambApply>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
