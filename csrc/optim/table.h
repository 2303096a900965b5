#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/operands.h"
#include "optim/rules.h"

namespace gpumode::optim {

// What a parameter keeps from step to step. All is on its device.
struct ParamState {
  at::Tensor step;                 // float32, one number
  std::vector<at::Tensor> states;  // one per state of the rule; undefined where there is none
  at::Tensor master;               // of the kind in `master_kind`
  Master master_kind = Master::None;
  at::Tensor scalar;  // float32, one number
};

// What becomes of gradients first, and whether there is a step at all. Numbers as tensors, on the
// table's device, so that nobody need wait for them; each may be undefined.
struct Scale {
  at::Tensor grad_scale;  // float32: gradients are divided by it
  at::Tensor found_inf;   // float32: if it is not 0, nothing is changed
  at::Tensor grad_sum;    // float64: the squared norm of all gradients, after that, ...
  double max_norm = std::numeric_limits<double>::infinity();  // ... which is clipped to this
};

// Squared norms of gradients.
struct GradSums {
  at::Tensor each;    // [number of parameters], float64; 0 of those that have none; or undefined
  at::Tensor total;   // float64, one number
  at::Tensor is_bad;  // float32, one number: 1 if the total is not finite, else 0
};

// The parameters of one optimizer on one device, what they keep, and the hyper-parameters of their
// groups. It reads the gradients itself, so that a step costs Python one call. All that can fail
// throws RuntimeError before anything is changed.
class Table {
 public:
  // Throws RuntimeError for a device whose kernels are not in this build.
  static std::unique_ptr<Table> make(const std::string& rule_name, at::Device device);

  explicit Table(const Rule& rule) : rule_(rule) {}
  virtual ~Table() = default;
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Adds a parameter of `group`, the optimizer's `number`-th. `param` is the memory that is
  // updated; its gradient is that of `owner`, or what set_grad says if `owner` is undefined.
  // Returns its index in the table.
  int64_t add(const at::Tensor& param, const at::Tensor& owner, int64_t group, int64_t number);
  void set_state(int64_t index, ParamState state);
  // Replaces one of the states; nothing if the parameter has none.
  void set_one_state(int64_t index, int64_t which, const at::Tensor& state);
  void set_grad(int64_t index, const at::Tensor& grad);
  // On the CPU; `values` as Rule::hyper.
  void set_hyper(int64_t group, std::vector<double> values);
  // The same for all groups, [groups, ...], float64, on the table's device. One that is contiguous
  // and has kMaxHyper columns is read when a kernel runs, not before.
  void set_hyper_tensor(const at::Tensor& hyper);
  // How what is stored as bfloat16 is rounded.
  void set_rounding(bool stochastic, uint64_t seed);

  // Those that have a gradient, and no state yet; if there are any, after a check of everything
  // that `step` will take.
  std::vector<int64_t> without_state() const;

  // Of the gradients as Scale::grad_scale leaves them.
  virtual GradSums grad_sums(const Scale& scale, bool needs_each) = 0;

  // Updates all parameters that have a gradient, in two halves. Between them the caller may change
  // what was summed over each parameter, [number of parameters, kMaxSums], float64: where others
  // have the rest of a tensor. Undefined if the step needs no sums.
  virtual at::Tensor start(const Scale& scale) = 0;
  virtual void finish(const Scale& scale, const at::Tensor& sums) = 0;

  // Whether a CUDA graph has recorded a step: the table must live as long as the graph.
  virtual bool was_recorded() const { return false; }

 protected:
  struct Param {
    at::Tensor param, owner, grad;
    int64_t group, number;
    std::optional<ParamState> state;
    // Of the parameter, where it has states in blocks, which have no shape.
    std::unique_ptr<const std::vector<int64_t>> sizes = nullptr;
    bool is_new = true;  // has changed in a way that the device's side must hear of
  };

  // Of the owner without the look at whether it is a leaf, which only warns.
  const at::Tensor& grad_of(const Param& param) const {
    return param.owner.defined() ? param.owner.unsafeGetTensorImpl()->grad() : param.grad;
  }
  void check(const Param& param, const at::Tensor& grad) const;
  // Whether all that belongs to a parameter is contiguous and of the dtypes that are usual, and so
  // needs no further look.
  bool is_plain(const Param& param, const at::Tensor& grad) const;
  // The tensors of a parameter that has a state, as the operands of `job`.
  Operands operands(Job* job, const Param& param, const at::Tensor& grad) const;

  const Rule& rule_;
  std::vector<Param> params_;
  size_t num_with_state_ = 0;
  std::vector<std::vector<double>> hyper_;  // by group
  at::Tensor hyper_tensor_;                 // or this
  bool stochastic_ = false;
  uint64_t seed_ = 0;
};

// Autograd notices that a tensor it has saved was changed.
void bump_version(const at::Tensor& tensor);

// Those of one device; `make` chooses.
std::unique_ptr<Table> make_cpu_table(const Rule& rule);
std::unique_ptr<Table> make_cuda_table(const Rule& rule, at::Device device);

}  // namespace gpumode::optim
