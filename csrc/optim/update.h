#pragma once

#include "optim/arithmetic.h"
#include "optim/job.h"

namespace gpumode::optim {

// An update is what one pass over the tensors does to one element, in the type T that it computes
// in: double for parameters of float64, else float. It is built from a Job, and then called per
// element:
//
//     update(p, g, states, terms)
//
// with what its kAccess says to read, in T, and changes in place what it says to write. A state
// that a Job has no memory for is 0, and what is written to it is dropped; the first
// kNumUsualStates are those that are there unless an option adds more. `terms` are summed over the
// tensor into Job::sums, for the pass that comes next. kSquares has a bit for each state that is
// never negative, since it is of squares.
enum Access : unsigned {
  kReadsParam = 1,
  kWritesParam = 2,
  kReadsGrad = 4,
  kReadsStates = 8,
  kWritesStates = 16,
  // It depends on Job::sums or Job::scalar, and so is of one tensor, not of all in a group.
  kIsOfItsTensor = 32,
  // It has `static double next_scalar(const Job&)`: what Job::scalar becomes.
  kWritesScalar = 64,
  // What nearly all do.
  kAll = kReadsParam | kWritesParam | kReadsGrad | kReadsStates | kWritesStates,
};

// The hyper-parameters of a group, as a struct of doubles.
template <class Hyper>
GPUMODE_HD const Hyper& hyper_of(const Job& job) {
  static_assert(sizeof(Hyper) <= kMaxHyper * sizeof(double));
  return *reinterpret_cast<const Hyper*>(job.hyper);
}

// What all of them do to a gradient first.
template <class T>
struct Gradient {
  T sign, decay;
  bool decays;  // else an infinite parameter would spoil its update

  GPUMODE_HD Gradient(double maximize, double weight_decay)
      : sign(maximize != 0.0 ? T(-1) : T(1)),
        decay(static_cast<T>(weight_decay)),
        decays(weight_decay != 0.0) {}
  GPUMODE_HD T operator()(T p, T g) const {
    g *= sign;
    return decays ? g + decay * p : g;
  }
};

}  // namespace gpumode::optim
