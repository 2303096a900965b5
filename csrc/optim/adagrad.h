#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct AdagradHyper {
  double lr, lr_decay, eps, weight_decay, maximize;
};

// Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization",
// 2011. State: the sum of g².
template <class T>
struct AdagradUpdate {
  static constexpr unsigned kAccess = kAll;
  static constexpr int kNumStates = 1, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0b1;
  static constexpr int kNumSums = 0;

  Gradient<T> gradient;
  T lr, eps;

  GPUMODE_HD explicit AdagradUpdate(const Job& job)
      : gradient(hyper_of<AdagradHyper>(job).maximize, hyper_of<AdagradHyper>(job).weight_decay) {
    const auto& h = hyper_of<AdagradHyper>(job);
    lr = static_cast<T>(h.lr / (1.0 + (job.step - 1.0) * h.lr_decay));
    eps = static_cast<T>(h.eps);
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g = gradient(p, g);
    states[0] += g * g;
    p -= lr * g / (root(states[0]) + eps);
  }
};

}  // namespace gpumode::optim
