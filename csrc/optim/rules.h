#pragma once

#include <string>
#include <vector>

#include "optim/passes.h"

namespace gpumode::optim {

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

const std::vector<const Rule*>& rules();

// Throws ValueError if there is none of that name.
const Rule& rule(const std::string& name);

}  // namespace gpumode::optim
