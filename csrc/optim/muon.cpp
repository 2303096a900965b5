#include "optim/muon.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kMuon = {"muon",
                    {"lr", "momentum", "weight_decay", "nesterov"},
                    2,
                    {pass_of<MuonDirection>(), pass_of<MuonApply>()},
                    nullptr};

}  // namespace gpumode::optim
