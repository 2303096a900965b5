#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled;
};

// Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; decoupled: Loshchilov and
// Hutter, "Decoupled Weight Decay Regularization", 2019; amsgrad: Reddi et al., "On the Convergence
// of Adam and Beyond", 2018. States: the averages of g and of g², and the largest of the latter.
template <class T>
struct AdamUpdate {
  static constexpr unsigned kAccess = kAll;
  static constexpr int kNumStates = 3, kNumUsualStates = 2;
  static constexpr unsigned kSquares = 0b110;
  static constexpr int kNumSums = 0;

  Gradient<T> gradient;
  T keep, beta1, rest1, beta2, rest2, step_size, inverse_root, eps;
  bool amsgrad;

  GPUMODE_HD explicit AdamUpdate(const Job& job)
      : gradient(hyper_of<AdamHyper>(job).maximize, hyper_of<AdamHyper>(job).decoupled != 0.0
                                                        ? 0.0
                                                        : hyper_of<AdamHyper>(job).weight_decay) {
    const auto& h = hyper_of<AdamHyper>(job);
    keep = static_cast<T>(h.decoupled != 0.0 ? 1.0 - h.lr * h.weight_decay : 1.0);
    beta1 = static_cast<T>(h.beta1);
    rest1 = static_cast<T>(1.0 - h.beta1);
    beta2 = static_cast<T>(h.beta2);
    rest2 = static_cast<T>(1.0 - h.beta2);
    step_size = static_cast<T>(h.lr / (1.0 - power(h.beta1, job.step)));
    inverse_root = static_cast<T>(1.0 / root(1.0 - power(h.beta2, job.step)));
    eps = static_cast<T>(h.eps);
    amsgrad = h.amsgrad != 0.0;
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g = gradient(p, g);
    p *= keep;
    const T average = states[0] = beta1 * states[0] + rest1 * g;
    T square = states[1] = beta2 * states[1] + rest2 * (g * g);
    const T largest = states[2] > square ? states[2] : square;
    states[2] = largest;
    square = amsgrad ? largest : square;
    p -= step_size * average / (root(square) * inverse_root + eps);
  }
};

}  // namespace gpumode::optim
