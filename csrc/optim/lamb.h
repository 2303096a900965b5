#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct LambHyper {
  double lr, beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, decoupled,
      always_adapts, maximize;
};

// You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020.
// States: the averages of g and of g². The direction is computed in both passes, since to store it
// in between would cost more than to read again what it is made of.
template <class T>
struct LambDirection {
  Gradient<T> gradient;
  T beta1, rest1, beta2, rest2, inverse1, inverse_root2, eps, decay;

  GPUMODE_HD explicit LambDirection(const Job& job)
      : gradient(hyper_of<LambHyper>(job).maximize, hyper_of<LambHyper>(job).decoupled != 0.0
                                                        ? 0.0
                                                        : hyper_of<LambHyper>(job).weight_decay) {
    const auto& h = hyper_of<LambHyper>(job);
    const bool corrects = h.bias_correction != 0.0;
    beta1 = static_cast<T>(h.beta1);
    rest1 = static_cast<T>(h.grad_averaging != 0.0 ? 1.0 - h.beta1 : 1.0);
    beta2 = static_cast<T>(h.beta2);
    rest2 = static_cast<T>(1.0 - h.beta2);
    inverse1 = static_cast<T>(corrects ? 1.0 / (1.0 - power(h.beta1, job.step)) : 1.0);
    inverse_root2 = static_cast<T>(corrects ? 1.0 / root(1.0 - power(h.beta2, job.step)) : 1.0);
    eps = static_cast<T>(h.eps);
    decay = static_cast<T>(h.decoupled != 0.0 ? h.weight_decay : 0.0);
  }

  GPUMODE_HD T operator()(T p, const T* states) const {
    return states[0] * inverse1 / (root(states[1]) * inverse_root2 + eps) + decay * p;
  }
};

// First pass: the averages, and the squared norms of the parameter and of its direction.
template <class T>
struct LambMoments {
  static constexpr unsigned kAccess = kReadsParam | kReadsGrad | kReadsStates | kWritesStates;
  static constexpr int kNumStates = 2, kNumUsualStates = 2;
  static constexpr unsigned kSquares = 0b10;
  static constexpr int kNumSums = 2;

  LambDirection<T> direction;

  GPUMODE_HD explicit LambMoments(const Job& job) : direction(job) {}

  GPUMODE_HD void operator()(T& p, T g, T* states, T* terms) const {
    g = direction.gradient(p, g);
    states[0] = direction.beta1 * states[0] + direction.rest1 * g;
    states[1] = direction.beta2 * states[1] + direction.rest2 * (g * g);
    const T d = direction(p, states);
    terms[0] = p * p;
    terms[1] = d * d;
  }
};

template <class T>
struct LambApply {
  static constexpr unsigned kAccess = kReadsParam | kWritesParam | kReadsStates | kIsOfItsTensor;
  static constexpr int kNumStates = 2, kNumUsualStates = 2;
  static constexpr unsigned kSquares = 0b10;
  static constexpr int kNumSums = 0;

  LambDirection<T> direction;
  T step_size;

  GPUMODE_HD explicit LambApply(const Job& job) : direction(job) {
    const auto& h = hyper_of<LambHyper>(job);
    const double of_param = root(job.sums[0]), of_direction = root(job.sums[1]);
    const bool adapts =
        (h.weight_decay != 0.0 || h.always_adapts != 0.0) && of_param > 0.0 && of_direction > 0.0;
    step_size = static_cast<T>(adapts ? h.lr * (of_param / of_direction) : h.lr);
  }

  GPUMODE_HD void operator()(T& p, T /*g*/, T* states, T* /*terms*/) const {
    p -= step_size * direction(p, states);
  }
};

}  // namespace gpumode::optim
