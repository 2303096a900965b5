#include "optim/muon.h"

#include "optim/cuda_pass.cuh"

namespace gpumode::optim {

template Status launch<MuonDirection>(const Launch& launch, void* stream);
template Status launch<MuonApply>(const Launch& launch, void* stream);

}  // namespace gpumode::optim
