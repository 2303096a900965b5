#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "c10d/backend.h"
#include "c10d/finishing_work.h"
#include "c10d/tensors.h"

// all_reduce of sparse tensors: every rank gathers the shapes of all, then all indices and values,
// and adds them up in rank order, so that all ranks get the same bits.
namespace gpumode {
namespace {

using Tensors = std::vector<at::Tensor>;

// [number of sparse dimensions, number of dimensions, number of values, sizes ..., 0 ...]
constexpr int64_t kMaxDims = 64;
constexpr int64_t kShapeLength = 3 + kMaxDims;

at::Tensor shape_of(const at::Tensor& tensor) {
  auto shape = at::zeros({kShapeLength}, at::kLong);
  auto* at = shape.data_ptr<int64_t>();
  *at++ = tensor.sparse_dim();
  *at++ = tensor.dim();
  *at++ = tensor._nnz();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), at);
  return shape;
}

// What the ranks bring. Its tensors belong to us alone, so that they may be released anywhere.
struct Gathered {
  at::ScalarType dtype;
  at::Tensor shapes;  // [size, kShapeLength]
  Tensors indices, values;

  const int64_t* shape(int64_t r) const {
    return shapes.const_data_ptr<int64_t>() + r * kShapeLength;
  }
  int64_t sparse_dim(int64_t r) const { return shape(r)[0]; }
  int64_t nnz(int64_t r) const { return shape(r)[2]; }
  at::IntArrayRef sizes(int64_t r) const {
    return {shape(r) + 3, static_cast<size_t>(shape(r)[1])};
  }
  std::string text(int64_t r) const {
    return "one of shape " + c10::str(sizes(r)) + ", of which " + std::to_string(sparse_dim(r)) +
           " are sparse";
  }

  Status check() const {
    for (int64_t r = 1; r < shapes.size(0); ++r) {
      if (sparse_dim(r) != sparse_dim(0) || sizes(r) != sizes(0)) {
        return {Code::Mismatch,
                "all_reduce of a sparse tensor: rank 0 brought " + text(0) + ", rank " +
                    std::to_string(r) + " " + text(r),
                {0, static_cast<int>(r)}};
      }
    }
    return {};
  }

  void allocate() {
    const auto dense = sizes(0).slice(static_cast<size_t>(sparse_dim(0)));
    for (int64_t r = 0; r < shapes.size(0); ++r) {
      std::vector<int64_t> of_values{nnz(r)};
      of_values.insert(of_values.end(), dense.begin(), dense.end());
      indices.push_back(at::empty({sparse_dim(r), nnz(r)}, at::kLong));
      values.push_back(at::empty(of_values, dtype));
    }
  }
};

// Runs when all shapes are there, on a communicator's thread, which no exception may leave.
Status receive(Gathered* gathered, OpDesc* indices) {
  auto status = gathered->check();
  if (!status.ok()) {
    return status;
  }
  try {
    gathered->allocate();
  } catch (const std::exception& error) {
    return {Code::Internal, std::string("all_reduce of a sparse tensor: ") + error.what()};
  }
  indices->outputs = buffers(gathered->indices);
  return {};
}

at::Tensor sum(const Gathered& gathered) {
  // In half precision every addition would round, and torch has none of sparse tensors.
  const bool is_half = gathered.dtype == at::kHalf || gathered.dtype == at::kBFloat16;
  at::Tensor total;
  for (size_t r = 0; r < gathered.values.size(); ++r) {
    const auto& values = gathered.values[r];
    const auto piece = at::_sparse_coo_tensor_unsafe(
        gathered.indices[r], is_half ? values.to(at::kFloat) : values, gathered.sizes(0),
        values.options().layout(at::kSparse).dtype(is_half ? at::kFloat : gathered.dtype),
        /*is_coalesced=*/true);
    total = total.defined() ? total.add_(piece) : piece;
  }
  return total;
}

void check_sparse(const Tensors& tensors, const ::c10d::ReduceOp& op) {
  check_length(tensors.size(), 1, "tensors");
  const auto& tensor = tensors[0];
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "tensors: sparse tensors on ", tensor.device(),
                    " are not supported by this build; expected cpu");
  TORCH_CHECK_VALUE(tensor.dim() <= kMaxDims, "tensors: expected at most ", kMaxDims,
                    " dimensions of a sparse tensor, got ", tensor.dim());
  TORCH_CHECK_VALUE(op == ::c10d::ReduceOp::SUM, "op: only SUM is defined for sparse tensors");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype != at::kBool && dtype != at::kUInt16 && dtype != at::kUInt32 && dtype != at::kUInt64,
      "tensors: torch does not add sparse tensors of ", dtype);
}

}  // namespace

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  check_sparse(tensors, opts.reduceOp);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_VALUE(open_coalescing() == nullptr,
                      "tensors: sparse ones cannot be coalesced with other ops");
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto& tensor = tensors[0];
  const auto mine = tensor.coalesce();
  const auto indices = mine._indices().contiguous();
  const auto values = mine._values().contiguous();
  const auto shape = shape_of(mine);

  auto gathered = std::make_shared<Gathered>();
  gathered->dtype = values.scalar_type();
  gathered->shapes = at::empty({current_size_, kShapeLength}, at::kLong);

  auto shapes_op = reducing_op(Collective::AllReduceSparse, opts.reduceOp, values, "tensors");
  shapes_op.inputs = {buffer(shape)};
  shapes_op.outputs = pieces(gathered->shapes, current_size_, "tensors");
  auto indices_op = moving_op(Collective::AllGather, indices);
  indices_op.inputs = {buffer(indices)};
  indices_op.prepare = [gathered](OpDesc* op) { return receive(gathered.get(), op); };
  auto values_op = moving_op(Collective::AllGather, values);
  values_op.inputs = {buffer(values)};
  values_op.prepare = [gathered](OpDesc* op) {
    op->outputs = buffers(gathered->values);
    return Status();
  };

  auto op = run({::c10d::OpType::_ALLREDUCE_SPARSE,
                 "gpumode:all_reduce_sparse",
                 {std::move(shapes_op), std::move(indices_op), std::move(values_op)},
                 {shape, indices, values},
                 {},
                 opts.timeout,
                 opts.asyncOp});
  return FinishingWork::start(current_rank_, ::c10d::OpType::_ALLREDUCE_SPARSE, std::move(op),
                              {tensor}, [gathered, tensor]() mutable {
                                const at::AutoDispatchBelowADInplaceOrView guard;
                                tensor.copy_(sum(*gathered));
                              });
}

}  // namespace gpumode
