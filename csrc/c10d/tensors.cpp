#include "c10d/tensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <string>

namespace gpumode {
namespace {

std::optional<DType> core_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::F16;
    case at::kBFloat16:
      return DType::BF16;
    case at::kFloat:
      return DType::F32;
    case at::kDouble:
      return DType::F64;
    case at::kChar:
      return DType::I8;
    case at::kByte:
      return DType::U8;
    case at::kShort:
      return DType::I16;
    case at::kUInt16:
      return DType::U16;
    case at::kInt:
      return DType::I32;
    case at::kUInt32:
      return DType::U32;
    case at::kLong:
      return DType::I64;
    case at::kUInt64:
      return DType::U64;
    case at::kBool:
      return DType::Bool;
    case at::kComplexFloat:
      return DType::C64;
    case at::kComplexDouble:
      return DType::C128;
    case at::kComplexHalf:
      return DType::C32;
    case at::kFloat8_e4m3fn:
      return DType::F8E4M3FN;
    case at::kFloat8_e4m3fnuz:
      return DType::F8E4M3FNUZ;
    case at::kFloat8_e5m2:
      return DType::F8E5M2;
    case at::kFloat8_e5m2fnuz:
      return DType::F8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::F8E8M0FNU;
    case at::kFloat4_e2m1fn_x2:
      return DType::F4E2M1FNx2;
    default:
      return std::nullopt;
  }
}

ReduceOp core_reduce_op(const ::c10d::ReduceOp& op) {
  switch (op.op_) {
    case ::c10d::ReduceOp::SUM:
      return ReduceOp::Sum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::Product;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    case ::c10d::ReduceOp::BAND:
      return ReduceOp::BAnd;
    case ::c10d::ReduceOp::BOR:
      return ReduceOp::BOr;
    case ::c10d::ReduceOp::BXOR:
      return ReduceOp::BXor;
    case ::c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::PreMulSum;
    default:
      TORCH_CHECK_VALUE(false, "op: unknown reduction ", static_cast<int>(op.op_));
  }
}

double premul_factor(const ::c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const GPUMODE_PREMUL_SUPPLEMENT*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "op: PREMUL_SUM needs a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

// 0 if elements lie in the order of their indices, else a number for the order of the dimensions.
uint64_t layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return 0;
  }
  std::vector<int64_t> dims;  // from the outermost in memory to the innermost
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) {
      dims.push_back(dim);
    }
  }
  std::sort(dims.begin(), dims.end(),
            [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  uint64_t layout = 1;
  for (const auto dim : dims) {
    layout = layout * 67 + static_cast<uint64_t>(dim);  // torch has at most 64 dimensions
  }
  return layout;
}

// What is split along the first dimension must have it outermost in memory.
void check_rows(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), argument,
                    ": expected a contiguous tensor, got sizes ", tensor.sizes(), " with strides ",
                    tensor.strides(), "; call .contiguous() first");
}

}  // namespace

void check_tensor(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(tensor.defined(), argument, ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, argument, ": expected a dense tensor, got ",
                    tensor.layout(), "; call .to_dense() first");
  TORCH_CHECK_VALUE(core_dtype(tensor.scalar_type()).has_value(), argument, ": ",
                    tensor.scalar_type(), " is not supported; move its bytes as torch.uint8");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), argument, ": tensors on ", tensor.device(),
                    " are not supported by this build; expected cpu");
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), argument,
                    ": expected a tensor without gaps and overlaps, got sizes ", tensor.sizes(),
                    " with strides ", tensor.strides(), "; call .contiguous() first");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), argument,
                    ": expected a tensor without a pending conjugation or negation; call "
                    ".resolve_conj().resolve_neg() first");
  // FSDP frees a parameter by resizing its storage under it.
  const auto end =
      static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.storage().nbytes() >= end, argument,
                    ": its storage has ", tensor.storage().nbytes(), " bytes where sizes ",
                    tensor.sizes(), " need ", end, "; was it freed?");
}

void check_tensors(const std::vector<at::Tensor>& tensors, const char* argument) {
  TORCH_CHECK_VALUE(!tensors.empty(), argument, ": expected at least one tensor");
  for (const auto& tensor : tensors) {
    check_tensor(tensor, argument);
  }
}

void check_length(size_t length, size_t expected, const char* argument) {
  TORCH_CHECK_VALUE(length == expected, argument, ": expected a list of ", expected,
                    " tensors, got ", length);
}

void check_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* argument) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type(), argument, ": expected ",
                    other.scalar_type(), " as in the other tensors of the call, got ",
                    tensor.scalar_type());
}

void check_same_format(const at::Tensor& tensor, const at::Tensor& other, const char* argument) {
  TORCH_CHECK_VALUE(layout_of(tensor) == layout_of(other), argument,
                    ": expected strides like those of the other tensors of the call, which are ",
                    other.strides(), ", got ", tensor.strides(),
                    "; bytes move as they lie in memory, so call .contiguous() on all");
}

void check_numel(const at::Tensor& tensor, int64_t expected, const char* argument) {
  TORCH_CHECK_VALUE(tensor.numel() == expected, argument, ": expected ", expected,
                    " elements, got ", tensor.numel());
}

void check_tensor_per_rank(const std::vector<at::Tensor>& tensors, int size, int rank,
                           const at::Tensor& mine, const char* argument) {
  check_length(tensors.size(), static_cast<size_t>(size), argument);
  for (const auto& tensor : tensors) {
    check_tensor(tensor, argument);
    check_same_dtype(tensor, mine, argument);
    check_same_format(tensor, mine, argument);
  }
  const auto numel = tensors[static_cast<size_t>(rank)].numel();
  TORCH_CHECK_VALUE(numel == mine.numel(), argument, "[", rank, "]: expected ", mine.numel(),
                    " elements, as many as this rank's other tensor has, got ", numel);
}

void check_overlap(const OpDesc& op, int in_place, const char* argument) {
  const auto begin = [](const Buffer& buffer) { return static_cast<const char*>(buffer.data); };
  const auto end = [&](const Buffer& buffer) { return begin(buffer) + buffer.nbytes; };
  const auto index = [&](size_t i, size_t length) {
    return length == 1 ? in_place : static_cast<int>(i);
  };
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      const auto& input = op.inputs[i];
      const auto& output = op.outputs[o];
      const bool same = input.data == output.data && input.nbytes == output.nbytes &&
                        index(i, op.inputs.size()) == in_place &&
                        index(o, op.outputs.size()) == in_place && in_place >= 0;
      TORCH_CHECK_VALUE(same || input.nbytes == 0 || output.nbytes == 0 ||
                            end(input) <= begin(output) || end(output) <= begin(input),
                        argument, ": overlaps the memory of an input");
    }
  }
}

int check_rank(int64_t rank, int size, const char* argument) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, argument, ": expected a rank in [0, ", size,
                    ") of the group, got ", rank);
  return static_cast<int>(rank);
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* argument) {
  check_length(tensors.size(), 1, argument);
  check_tensor(tensors[0], argument);
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    const char* argument) {
  TORCH_CHECK_VALUE(lists.size() == 1, argument, ": expected one list of tensors, got ",
                    lists.size());
  return lists[0];
}

Buffer buffer(const at::Tensor& tensor) {
  return {tensor.data_ptr(), static_cast<size_t>(tensor.nbytes())};
}

std::vector<Buffer> buffers(const std::vector<at::Tensor>& tensors) {
  std::vector<Buffer> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    result.push_back(buffer(tensor));
  }
  return result;
}

std::vector<Buffer> pieces(const at::Tensor& tensor, int count, const char* argument) {
  check_rows(tensor, argument);
  TORCH_CHECK_VALUE(tensor.numel() % count == 0, argument, ": expected a multiple of ", count,
                    " elements, got ", tensor.numel());
  const auto whole = buffer(tensor);
  const size_t nbytes = whole.nbytes / static_cast<size_t>(count);
  std::vector<Buffer> result(static_cast<size_t>(count));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = {static_cast<char*>(whole.data) + i * nbytes, nbytes};
  }
  return result;
}

std::vector<Buffer> pieces(const at::Tensor& tensor, const std::vector<int64_t>& splits, int count,
                           const char* argument) {
  check_rows(tensor, argument);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % count == 0, argument, ": expected a first dimension that ", count,
                      " divides, got ", rows);
    return pieces(tensor, count, argument);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(count), argument,
                    ": expected split sizes for ", count, " ranks, got ", splits.size());
  int64_t total = 0;
  for (const auto split : splits) {
    TORCH_CHECK_VALUE(split >= 0 && split <= rows, argument, ": expected split sizes in [0, ", rows,
                      "], got ", split);
    total += split;
  }
  TORCH_CHECK_VALUE(total == rows, argument, ": split sizes add up to ", total,
                    " but the first dimension is ", rows);
  const auto whole = buffer(tensor);
  const size_t row_nbytes = rows == 0 ? 0 : whole.nbytes / static_cast<size_t>(rows);
  std::vector<Buffer> result;
  result.reserve(splits.size());
  auto* data = static_cast<char*>(whole.data);
  for (const auto split : splits) {
    const size_t nbytes = static_cast<size_t>(split) * row_nbytes;
    result.push_back({data, nbytes});
    data += nbytes;
  }
  return result;
}

OpDesc moving_op(Collective collective, const at::Tensor& tensor) {
  OpDesc op;
  op.collective = collective;
  op.dtype = *core_dtype(tensor.scalar_type());
  op.layout = layout_of(tensor);
  return op;
}

OpDesc reducing_op(Collective collective, const ::c10d::ReduceOp& reduce_op,
                   const at::Tensor& tensor, const char* argument) {
  auto op = moving_op(collective, tensor);
  TORCH_CHECK_VALUE(is_reducible(op.dtype), argument, ": ", name(op.dtype),
                    " can be moved but not reduced");
  op.reduce_op = core_reduce_op(reduce_op);
  TORCH_CHECK_VALUE(supports(op.reduce_op, op.dtype), "op: ", name(op.reduce_op),
                    " is not defined for ", name(op.dtype), " (", argument, ")");
  if (op.reduce_op == ReduceOp::PreMulSum) {
    op.factor = premul_factor(reduce_op);
  }
  return op;
}

}  // namespace gpumode
