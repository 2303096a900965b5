#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "optim/operands.h"
#include "optim/passes.h"
#include "optim/rules.h"

namespace gpumode::optim {

// What a parameter keeps from step to step.
struct ParamState {
  at::Tensor step;                 // float32, one number
  std::vector<at::Tensor> states;  // one per state of the rule; undefined where there is none
  at::Tensor master;               // of the kind in `master_kind`
  Master master_kind = Master::None;
  at::Tensor scalar;  // float32, one number
};

// The parameters of one optimizer, what they keep, and the hyper-parameters of their groups. It
// reads the gradients itself, so that a step costs Python one call. All that can fail throws
// RuntimeError before anything is changed.
class Table {
 public:
  explicit Table(const std::string& rule_name);

  // Adds a parameter of `group`, the optimizer's `number`-th. `param` is the memory that is
  // updated; its gradient is that of `owner`, or what set_grad says if `owner` is undefined.
  // Returns its index in the table.
  int64_t add(const at::Tensor& param, const at::Tensor& owner, int64_t group, int64_t number);
  void set_state(int64_t index, ParamState state);
  // Replaces one of the states; nothing if the parameter has none.
  void set_one_state(int64_t index, int64_t which, const at::Tensor& state);
  void set_grad(int64_t index, const at::Tensor& grad);
  // `values` as Rule::hyper.
  void set_hyper(int64_t group, std::vector<double> values, bool stochastic, uint64_t seed);

  // Those that have a gradient, and no state yet; if there are any, after a check of everything
  // that `step` will take.
  std::vector<int64_t> without_state() const;

  // [number of parameters], float64: the squared norms of the gradients times `factor`, 0 of those
  // that have none.
  at::Tensor grad_sums(double factor);

  // Updates all parameters that have a gradient, in two halves. Between them the caller may change
  // what was summed over each parameter, [number of parameters, kMaxSums], float64: where others
  // have the rest of a tensor. Undefined if the step needs no sums.
  at::Tensor start(const StepOptions& options);
  void finish(const StepOptions& options, const at::Tensor& sums);

 private:
  struct Param {
    at::Tensor param, owner, grad;
    int64_t group, number;
    std::optional<ParamState> state;
  };
  struct Group {
    std::vector<double> hyper;
    bool stochastic = false;
    uint64_t seed = 0;
  };

  const at::Tensor& grad_of(const Param& param) const;
  bool is_plain(const Param& param, const at::Tensor& grad) const;
  void check(const Param& param, const at::Tensor& grad) const;
  void collect_jobs();
  void fill(Job* job, const Param& param, const at::Tensor& grad) const;
  Operands operands(Job* job, const Param& param, const at::Tensor& grad) const;
  at::Tensor sums() const;

  const Rule& rule_;
  std::vector<Param> params_;
  std::vector<Group> groups_;
  // Of the step that runs; kept for their memory.
  std::vector<Job> jobs_;
  std::vector<const Param*> job_params_;
  std::deque<Layout> layouts_;
  Passes passes_;
};

// The same of gradients alone: their norm as one vector, and multiplying them.
double grad_norm(const std::vector<at::Tensor>& grads);
void scale_(const std::vector<at::Tensor>& grads, double factor);

}  // namespace gpumode::optim
