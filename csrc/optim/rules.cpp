#include "optim/rules.h"

#include <c10/util/Exception.h>

#include "optim/adagrad.h"
#include "optim/adam.h"
#include "optim/grads.h"
#include "optim/lamb.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/novograd.h"
#include "optim/rmsprop.h"
#include "optim/sgd.h"

namespace gpumode::optim {
namespace {

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = {
      {"adam",
       {"lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize", "decoupled"},
       3,
       {run_pieces<AdamUpdate>},
       nullptr},
      {"sgd",
       {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"},
       1,
       {run_pieces<SgdUpdate>},
       nullptr},
      {"adagrad",
       {"lr", "lr_decay", "eps", "weight_decay", "maximize"},
       1,
       {run_pieces<AdagradUpdate>},
       nullptr},
      {"rmsprop",
       {"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"},
       3,
       {run_pieces<RmspropUpdate>},
       nullptr},
      {"lion",
       {"lr", "beta1", "beta2", "weight_decay", "maximize"},
       1,
       {run_pieces<LionUpdate>},
       nullptr},
      {"lamb",
       {"lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction", "grad_averaging",
        "decoupled", "always_adapts", "maximize"},
       2,
       {run_pieces<LambMoments>, run_pieces<LambApply>},
       nullptr},
      {"muon",
       {"lr", "momentum", "weight_decay", "nesterov"},
       2,
       {run_pieces<MuonDirection>, run_pieces<MuonApply>},
       nullptr},
      {"novograd",
       {"lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction", "grad_averaging",
        "inside_moment", "init_zero", "maximize"},
       1,
       {run_pieces<GradNorm>, run_pieces<NovogradUpdate>},
       NovogradUpdate<double>::next_scalar},
  };
  return all;
}

}  // namespace

const Rule& rule(const std::string& name) {
  for (const Rule& rule : rules()) {
    if (name == rule.name) return rule;
  }
  TORCH_CHECK_VALUE(false, "rule: there is none named ", name);
}

}  // namespace gpumode::optim
