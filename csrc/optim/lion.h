#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct LionHyper {
  double lr, beta1, beta2, weight_decay, maximize;
};

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023. State: the average of g.
template <class T>
struct LionUpdate {
  static constexpr unsigned kAccess = kAll;
  static constexpr int kNumStates = 1, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  Gradient<T> gradient;
  T keep, lr, beta1, rest1, beta2, rest2;

  GPUMODE_HD explicit LionUpdate(const Job& job)
      : gradient(hyper_of<LionHyper>(job).maximize, 0.0) {
    const auto& h = hyper_of<LionHyper>(job);
    keep = static_cast<T>(1.0 - h.lr * h.weight_decay);
    lr = static_cast<T>(h.lr);
    beta1 = static_cast<T>(h.beta1);
    rest1 = static_cast<T>(1.0 - h.beta1);
    beta2 = static_cast<T>(h.beta2);
    rest2 = static_cast<T>(1.0 - h.beta2);
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g = gradient(p, g);
    const T direction = beta1 * states[0] + rest1 * g;
    p = p * keep - lr * sign(direction);
    states[0] = beta2 * states[0] + rest2 * g;
  }
};

}  // namespace gpumode::optim
