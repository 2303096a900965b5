#include "optim/rules.h"

#include <c10/util/Exception.h>

namespace gpumode::optim {

const std::vector<const Rule*>& rules() {
  static const std::vector<const Rule*> all = {&kAdam, &kSgd,  &kAdagrad, &kRmsprop,
                                               &kLion, &kLamb, &kMuon,    &kNovograd};
  return all;
}

const Rule& rule(const std::string& name) {
  for (const Rule* rule : rules()) {
    if (name == rule->name) return *rule;
  }
  if (name == kGrads.name) return kGrads;
  TORCH_CHECK_VALUE(false, "rule: there is none named ", name);
}

}  // namespace gpumode::optim
