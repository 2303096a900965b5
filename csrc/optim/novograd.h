#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct NovogradHyper {
  double lr, beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, inside_moment,
      init_zero, maximize;
};

// Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
// Deep Networks", 2019, which has weight decay inside the moment; outside as in Apex. State: the
// average of the gradient, normalised before (inside) or after; and one number per tensor, the
// average of its gradient's squared norm.

// Its first pass is GradNorm.
template <class T>
struct NovogradUpdate {
  static constexpr unsigned kAccess = kAll | kIsOfItsTensor | kWritesScalar;
  static constexpr int kNumStates = 1, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  T sign, lr, beta1, rest1, inverse1, inverse2, decay;
  bool is_inside;

  GPUMODE_HD explicit NovogradUpdate(const Job& job) {
    const auto& h = hyper_of<NovogradHyper>(job);
    const bool corrects = h.bias_correction != 0.0;
    const double root2 = corrects ? root(1.0 - power(h.beta2, job.step)) : 1.0;
    sign = h.maximize != 0.0 ? T(-1) : T(1);
    lr = static_cast<T>(h.lr);
    beta1 = static_cast<T>(h.beta1);
    rest1 = static_cast<T>(h.grad_averaging != 0.0 ? 1.0 - h.beta1 : 1.0);
    inverse1 = static_cast<T>(corrects ? 1.0 / (1.0 - power(h.beta1, job.step)) : 1.0);
    inverse2 = static_cast<T>(1.0 / (root(next_scalar(job)) / root2 + h.eps));
    decay = static_cast<T>(h.weight_decay);
    is_inside = h.inside_moment != 0.0;
  }

  GPUMODE_HD static double next_scalar(const Job& job) {
    const auto& h = hyper_of<NovogradHyper>(job);
    if (job.step == 1.0 && h.init_zero == 0.0) return job.sums[0];
    return h.beta2 * job.scalar + (1.0 - h.beta2) * job.sums[0];
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g *= sign;
    const T averaged = is_inside ? g * inverse2 + decay * p : g;
    const T average = states[0] = beta1 * states[0] + rest1 * averaged;
    p -= lr * (is_inside ? average * inverse1 : average * inverse1 * inverse2 + decay * p);
  }
};

}  // namespace gpumode::optim
