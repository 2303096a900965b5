#pragma once

#include "optim/update.h"

namespace gpumode::optim {

struct SgdHyper {
  double lr, momentum, dampening, weight_decay, nesterov, maximize;
};

// Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, in
// torch's form: the first step takes the gradient undamped. State: the momentum's buffer.
template <class T>
struct SgdUpdate {
  static constexpr unsigned kAccess = kAll;
  static constexpr int kNumStates = 1, kNumUsualStates = 1;
  static constexpr unsigned kSquares = 0;
  static constexpr int kNumSums = 0;

  Gradient<T> gradient;
  T lr, momentum, old, share;
  bool has_momentum, nesterov;

  GPUMODE_HD explicit SgdUpdate(const Job& job)
      : gradient(hyper_of<SgdHyper>(job).maximize, hyper_of<SgdHyper>(job).weight_decay) {
    const auto& h = hyper_of<SgdHyper>(job);
    const bool is_first = job.step == 1.0;
    lr = static_cast<T>(h.lr);
    momentum = static_cast<T>(h.momentum);
    old = static_cast<T>(is_first ? 0.0 : h.momentum);
    share = static_cast<T>(is_first ? 1.0 : 1.0 - h.dampening);
    has_momentum = h.momentum != 0.0;
    nesterov = h.nesterov != 0.0;
  }

  GPUMODE_HD void operator()(T& p, T g, T* states, T* /*terms*/) const {
    g = gradient(p, g);
    const T buffer = old * states[0] + share * g;
    states[0] = buffer;
    const T moved = nesterov ? g + momentum * buffer : buffer;
    p -= lr * (has_momentum ? moved : g);
  }
};

}  // namespace gpumode::optim
