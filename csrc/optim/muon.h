#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct MuonHyper {
  double lr, momentum, weight_decay, nesterov;
};

// Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. States: the
// direction, which the caller makes orthogonal between the passes, and the momentum's buffer.

// First pass: the momentum, and the direction from it.
template <class T>
struct MuonDirection {
  static constexpr unsigned kAccess = kReadsGrad | kReadsStates | kWritesStates;
  static constexpr int kNumStates = 2, kNumUsualStates = 2;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  T momentum, rest;
  bool nesterov;

  GPUMODE_HD explicit MuonDirection(const Job& job) {
    const auto& h = hyper_of<MuonHyper>(job);
    momentum = static_cast<T>(h.momentum);
    rest = static_cast<T>(1.0 - h.momentum);
    nesterov = h.nesterov != 0.0;
  }

  GPUMODE_HD void operator()(T& /*p*/, T g, T* states, T* /*terms*/) const {
    const T buffer = momentum * states[1] + rest * g;
    states[1] = buffer;
    states[0] = nesterov ? rest * g + momentum * buffer : buffer;
  }
};

// Job::scalar is what the learning rate is multiplied by for a matrix of this shape.
template <class T>
struct MuonApply {
  static constexpr unsigned kAccess = kReadsParam | kWritesParam | kReadsStates | kIsOfItsTensor;
  static constexpr int kNumStates = 1, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  T keep, lr;

  GPUMODE_HD explicit MuonApply(const Job& job) {
    const auto& h = hyper_of<MuonHyper>(job);
    keep = static_cast<T>(1.0 - h.lr * h.weight_decay);
    lr = static_cast<T>(h.lr * job.scalar);
  }

  GPUMODE_HD void operator()(T& p, T /*g*/, T* states, T* /*terms*/) const {
    p = p * keep - lr * states[0];
  }
};

}  // namespace gpumode::optim
