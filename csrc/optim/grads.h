#pragma once

#include "optim/update.h"

namespace gpumode::optim {

// What torch.nn.utils.clip_grad_norm_ multiplies gradients of this norm by. A NaN stays one.
GPUMODE_HD double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

// The squared norm of a gradient.
template <class T>
struct GradNorm {
  static constexpr unsigned kAccess = kReadsGrad;
  static constexpr int kNumStates = 0, kNumUsualStates = 0;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 1;

  GPUMODE_HD explicit GradNorm(const Job& /*job*/) {}
  GPUMODE_HD void operator()(T& /*p*/, T g, T* /*states*/, T* terms) const { terms[0] = g * g; }
};

// Multiplies the job's parameter by StepOptions::grad_factor.
template <class T>
struct GradScale {
  static constexpr unsigned kAccess = kReadsParam | kWritesParam | kReadsGrad;
  static constexpr int kNumStates = 0, kNumUsualStates = 0;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  GPUMODE_HD explicit GradScale(const Job& /*job*/) {}
  // `g` is multiplied by it already.
  GPUMODE_HD void operator()(T& p, T g, T* /*states*/, T* /*terms*/) const { p = g; }
};

}  // namespace gpumode::optim
