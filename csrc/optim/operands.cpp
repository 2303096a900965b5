#include "optim/operands.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <numeric>

#include "optim/blocks.h"

namespace gpumode::optim {
namespace {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::F16;
    case at::kBFloat16:
      return DType::BF16;
    case at::kDouble:
      return DType::F64;
    case at::kShort:
      return DType::I16;
    case at::kByte:
      return DType::U8;
    default:
      return DType::F32;
  }
}

// Whether their elements lie in the same order.
bool same_order(const at::Tensor& param, const at::Tensor& other) {
  return other.strides() == param.strides() || param.numel() <= 1 ||
         (param.is_contiguous() && other.is_contiguous());
}

}  // namespace

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

bool is_in_blocks(const at::Tensor& param, const at::Tensor& state) {
  return state.scalar_type() == at::kByte && state.layout() == at::kStrided && state.dim() == 1 &&
         state.is_contiguous() && state.numel() == blocks_nbytes(param.numel()) &&
         param.is_contiguous() && param.scalar_type() != at::kDouble &&
         state.device() == param.device();
}

Operand operand(const at::Tensor& tensor) {
  return {tensor.unsafeGetTensorImpl()->mutable_data(), nullptr, dtype_of(tensor)};
}

void check_grad(const at::Tensor& param, const at::Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kStrided,
              "sparse gradients are not supported: that of a parameter of shape ", param.sizes(),
              " has the layout ", grad.layout());
  TORCH_CHECK(grad.device() == param.device(), "the gradient of a parameter on ", param.device(),
              " is on ", grad.device());
  TORCH_CHECK(is_supported(grad.scalar_type()), "the gradient of a parameter of shape ",
              param.sizes(), " is of ", grad.scalar_type(),
              "; expected float32, bfloat16, float16 or float64");
  TORCH_CHECK(grad.sizes() == param.sizes(), "the gradient of a parameter of shape ", param.sizes(),
              " has the shape ", grad.sizes());
  TORCH_CHECK(is_supported(param.scalar_type()), "a parameter of shape ", param.sizes(), " is of ",
              param.scalar_type(), "; expected float32, bfloat16, float16 or float64");
  TORCH_CHECK(at::has_internal_overlap(param) != at::MemOverlap::Yes, "a parameter of shape ",
              param.sizes(), " shares memory with itself (an expanded tensor)");
}

void check_state(const at::Tensor& param, const at::Tensor& state, const char* what,
                 at::ScalarType dtype) {
  if (dtype == at::ScalarType::Undefined) {
    if (is_in_blocks(param, state)) return;
    TORCH_CHECK(state.scalar_type() != at::kByte, "the ", what, " of a parameter of shape ",
                param.sizes(), " is in blocks of 8 bits, and has ", state.numel(), " bytes in ",
                state.dim(), " dimensions on ", state.device(), "; the parameter is of ",
                param.scalar_type(), " on ", param.device(),
                param.is_contiguous() ? ", contiguous" : ", and not contiguous", ": expected ",
                blocks_nbytes(param.numel()),
                " bytes in one dimension, contiguous, on the device of a contiguous parameter that "
                "is not of float64");
  }
  TORCH_CHECK(state.sizes() == param.sizes(), "the ", what, " of a parameter of shape ",
              param.sizes(), " has the shape ", state.sizes());
  TORCH_CHECK(state.device() == param.device(), "the ", what, " of a parameter on ", param.device(),
              " is on ", state.device());
  const bool fits = dtype == at::ScalarType::Undefined ? is_supported(state.scalar_type())
                                                       : state.scalar_type() == dtype;
  TORCH_CHECK(fits && state.layout() == at::kStrided, "the ", what, " of a parameter of shape ",
              param.sizes(), " is of ", state.scalar_type(), ", ", state.layout());
  TORCH_CHECK(at::has_internal_overlap(state) != at::MemOverlap::Yes, "the ", what,
              " of a parameter shares memory with itself (an expanded tensor)");
}

void check_number(const at::Tensor& param, const at::Tensor& number) {
  TORCH_CHECK(number.numel() == 1 && number.scalar_type() == at::kFloat &&
                  number.device() == param.device(),
              "step, or another state of one number, of a parameter on ", param.device(), " is ",
              number.numel(), " of ", number.scalar_type(), " on ", number.device(),
              "; expected one of float32");
}

// The outermost dimension is the one whose elements lie farthest apart in the parameter, and
// neighbours that can be walked as one are merged.
void lay_out(Job* job, const Operands& operands, std::deque<Layout>* layouts) {
  const at::Tensor& p = *operands[0].first;
  const bool same = std::all_of(operands.begin(), operands.end(),
                                [&](const auto& one) { return same_order(p, *one.first); });
  if (job->numel == 0 || (same && p.is_non_overlapping_and_dense())) return;

  std::vector<int64_t> order(static_cast<size_t>(p.dim()));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return p.stride(a) > p.stride(b); });
  Layout& layout = layouts->emplace_back();
  for (const int64_t d : order) {
    const int64_t size = p.size(d);
    if (size == 1) continue;
    bool merges = !layout.sizes.empty();
    for (size_t o = 0; o < operands.size() && merges; ++o) {
      merges = layout.strides[o].back() == operands[o].first->stride(d) * size;
    }
    if (merges) layout.sizes.back() *= size;
    if (!merges) layout.sizes.push_back(size);
    for (size_t o = 0; o < operands.size(); ++o) {
      if (merges) layout.strides[o].pop_back();
      layout.strides[o].push_back(operands[o].first->stride(d));
    }
  }
  TORCH_CHECK(layout.sizes.size() <= kMaxDims, "a parameter of ", p.dim(),
              " dimensions, which lie in another order than those of its gradient or states: "
              "expected at most ",
              kMaxDims);
  job->num_dims = static_cast<int>(layout.sizes.size());
  job->sizes = layout.sizes.data();
  for (size_t o = 0; o < operands.size(); ++o)
    operands[o].second->strides = layout.strides[o].data();
}

}  // namespace gpumode::optim
