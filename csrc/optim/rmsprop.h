#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct RmspropHyper {
  double lr, alpha, eps, weight_decay, momentum, centered, maximize;
};

// Hinton's lecture 6e, 2012; centered: Graves, "Generating Sequences With Recurrent Neural
// Networks", 2013. States: the average of g², the momentum's buffer, the average of g.
template <class T>
struct RmspropUpdate {
  static constexpr unsigned kAccess = kAll;
  static constexpr int kNumStates = 3, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0b1;
  static constexpr int kNumSums = 0;

  Gradient<T> gradient;
  T lr, alpha, rest, eps, momentum;
  bool has_momentum, centered;

  GPUMODE_HD explicit RmspropUpdate(const Job& job)
      : gradient(hyper_of<RmspropHyper>(job).maximize, hyper_of<RmspropHyper>(job).weight_decay) {
    const auto& h = hyper_of<RmspropHyper>(job);
    lr = static_cast<T>(h.lr);
    alpha = static_cast<T>(h.alpha);
    rest = static_cast<T>(1.0 - h.alpha);
    eps = static_cast<T>(h.eps);
    momentum = static_cast<T>(h.momentum);
    has_momentum = h.momentum != 0.0;
    centered = h.centered != 0.0;
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g = gradient(p, g);
    T square = states[0] = alpha * states[0] + rest * (g * g);
    const T average = alpha * states[2] + rest * g;
    states[2] = average;
    // Rounding may leave less than nothing.
    T variance = square - average * average;
    variance = variance < T(0) ? T(0) : variance;
    square = centered ? variance : square;
    const T scaled = g / (root(square) + eps);
    const T buffer = momentum * states[1] + scaled;
    states[1] = buffer;
    p -= lr * (has_momentum ? buffer : scaled);
  }
};

}  // namespace gpumode::optim
