#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

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
// reads the gradients itself, so that a step costs Python one call.
class Table {
 public:
  explicit Table(const std::string& rule_name);

  // Adds a parameter of `group`. `param` is the memory that is updated; its gradient is that of
  // `owner`, or what set_grad says if `owner` is undefined. Returns its index.
  int64_t add(const at::Tensor& param, const at::Tensor& owner, int64_t group);
  void set_state(int64_t index, ParamState state);
  void set_grad(int64_t index, const at::Tensor& grad);
  // `values` as Rule::hyper.
  void set_hyper(int64_t group, std::vector<double> values, bool stochastic, uint64_t seed);

  // Those that have a gradient, and no state yet.
  std::vector<int64_t> without_state() const;

  // Updates all parameters that have a gradient. RuntimeError, with nothing changed, if a gradient
  // or a state is none that it can take, or the parameter overlaps itself.
  void step(const StepOptions& options);

 private:
  struct Param {
    at::Tensor param, owner, grad;
    int64_t group;
    std::optional<ParamState> state;
  };
  struct Group {
    std::vector<double> hyper;
    bool stochastic = false;
    uint64_t seed = 0;
  };
  // Sizes and strides of what does not lie as its parameter does.
  struct Layout {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides[3 + kMaxStates];
  };

  const at::Tensor& grad_of(const Param& param) const;
  bool is_plain(const Param& param, const at::Tensor& grad) const;
  void check(const Param& param, const at::Tensor& grad) const;
  void collect_jobs();
  void fill(Job* job, const Param& param, const at::Tensor& grad);
  void lay_out(Job* job, const Param& param, const at::Tensor& grad);
  void cut();
  void run(const StepOptions& options);

  const Rule& rule_;
  std::vector<Param> params_;
  std::vector<Group> groups_;
  // Of the step that runs; kept for their memory.
  std::vector<Job> jobs_;
  std::vector<const Param*> job_params_;
  std::vector<Piece> pieces_;
  std::vector<double> sums_;
  std::deque<Layout> layouts_;
};

}  // namespace gpumode::optim
