#pragma once

#include <string>
#include <vector>

#include "optim/cpu_pass.h"
#include "optim/cuda_pass.h"

namespace gpumode::optim {

// One pass of an update, over tensors on the CPU or on a CUDA device.
struct Pass {
  void (*on_cpu)(const Piece* pieces, int64_t num_pieces, const StepOptions& options, double* sums);
  Status (*on_cuda)(const Launch& launch, void* stream);  // nullptr in a build without CUDA
  int num_usual_states;                                   // Update::kNumUsualStates
};

template <template <class> class Update>
constexpr Pass pass_of() {
#ifdef GPUMODE_WITH_CUDA
  return {run_pieces<Update>, launch<Update>, Update<float>::kNumUsualStates};
#else
  return {run_pieces<Update>, nullptr, Update<float>::kNumUsualStates};
#endif
}

// One optimizer: what its groups set, what its tensors keep, and the passes of its step.
struct Rule {
  const char* name;
  // Keys of a param group, in the order of the Hyper struct.
  std::vector<const char*> hyper;
  int num_states;
  std::vector<Pass> passes;
  // What Job::scalar becomes, once the first pass has summed; nullptr where there is no such state.
  double (*next_scalar)(const Job& job);
};

// One file each.
extern const Rule kAdam, kSgd, kAdagrad, kRmsprop, kLion, kLamb, kMuon, kNovograd;
// Multiplies gradients: its parameters are themselves their gradients, and keep nothing.
extern const Rule kGrads;
// Sums the squares of a gradient.
extern const Pass kGradNorm;

const std::vector<const Rule*>& rules();

// Throws ValueError if there is none of that name.
const Rule& rule(const std::string& name);

}  // namespace gpumode::optim
