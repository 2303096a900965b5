#include "optim/muon.h"

#include "optim/rules.h"

namespace gpumode::optim {

const Rule kMuon = {"muon",
                    {"lr", "momentum", "weight_decay", "nesterov"},
                    2,
                    {run_pieces<MuonDirection>, run_pieces<MuonApply>},
                    nullptr};

}  // namespace gpumode::optim
