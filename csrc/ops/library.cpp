#include "ops/library.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "ops/optim.h"

namespace gpumode::ops {
namespace {

using optim::Rule;

constexpr const char* kOptimArgs =
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] masters, "
    "Tensor(d!)[] steps, Tensor(e!)[] scalars, Tensor hyper, int[] groups, *, "
    "int[]? numbers=None, int[]? present=None, str? master=None, bool stochastic=False, "
    "int seed=0, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? grad_sum=None, "
    "float? max_norm=None) -> ()";
constexpr const char* kGradSum = "grad_sum(Tensor[] grads, Tensor? grad_scale=None) -> Tensor";

using MaybeInts = at::OptionalIntArrayRef;
using MaybeTensor = std::optional<at::Tensor>;

// A function with the arguments of kOptimArgs that calls run(rule, args).
template <class Run>
auto with_args(const Rule& rule, Run run) {
  return [&rule, run](at::TensorList params, at::TensorList grads, at::TensorList states,
                      at::TensorList masters, at::TensorList steps, at::TensorList scalars,
                      const at::Tensor& hyper, at::IntArrayRef groups, MaybeInts numbers,
                      MaybeInts present, std::optional<std::string_view> master, bool stochastic,
                      int64_t seed, const MaybeTensor& grad_scale, const MaybeTensor& found_inf,
                      const MaybeTensor& grad_sum, std::optional<double> max_norm) {
    OptimArgs args;
    args.params = params;
    args.grads = grads;
    args.states = states;
    args.masters = masters;
    args.steps = steps;
    args.scalars = scalars;
    args.hyper = hyper;
    args.groups = groups;
    if (numbers) args.numbers = numbers->vec();
    if (present) args.present = present->vec();
    args.master = master;
    args.stochastic = stochastic;
    args.seed = seed;
    args.grad_scale = grad_scale;
    args.found_inf = found_inf;
    args.grad_sum = grad_sum;
    args.max_norm = max_norm;
    run(rule, args);
  };
}

// Those of sparse tensors are here so that it is us who say that there is nothing for them.
constexpr c10::DispatchKey kDevices[] = {
    c10::DispatchKey::CPU,  c10::DispatchKey::SparseCPU,  c10::DispatchKey::SparseCsrCPU,
    c10::DispatchKey::CUDA, c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA};

void define_step(torch::Library* m, const Rule& rule) {
  const std::string name = std::string(rule.name) + "_";
  m->def((name + kOptimArgs).c_str());
  for (const auto key : kDevices) {
    m->impl(name.c_str(), torch::dispatch(key, with_args(rule, step)));
  }
  m->impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, with_args(rule, check_lists)));
}

void define_grad_sum(torch::Library* m) {
  const auto on_meta = [](at::TensorList /*grads*/, const MaybeTensor& /*grad_scale*/) {
    return at::empty({}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
  };
  m->def(kGradSum);
  for (const auto key : kDevices) m->impl("grad_sum", torch::dispatch(key, grad_sum));
  m->impl("grad_sum", torch::dispatch(c10::DispatchKey::Meta, on_meta));
}

// It has no derivative: backward through it fails, and so does what would need one.
void no_derivative(torch::Library* m, const std::string& name) {
  m->impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd,
                                        torch::autograd::autogradNotImplementedFallback()));
}

}  // namespace

// Not while the library is loaded: the rules, which other files make, might not be there yet.
void define_all() {
  static torch::Library library(torch::Library::FRAGMENT, "gpumode", std::nullopt, __FILE__,
                                __LINE__);
  for (const Rule* rule : optim::rules()) {
    if (!has_op(*rule)) continue;
    define_step(&library, *rule);
    no_derivative(&library, std::string(rule->name) + "_");
  }
  define_grad_sum(&library);
  no_derivative(&library, "grad_sum");
}

}  // namespace gpumode::ops
