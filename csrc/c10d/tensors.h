#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "c10d/torch_version.h"
#include "core/op.h"

namespace gpumode {

// From at::Tensor to the core's buffers. Every check throws ValueError naming the argument, before
// anything is started or changed.

// On the CPU, of a dtype that the core knows, and without gaps and overlaps; elements may lie in
// any order, which all members must share.
void check_tensor(const at::Tensor& tensor, const char* argument);
void check_tensors(const std::vector<at::Tensor>& tensors, const char* argument);
void check_length(size_t length, size_t expected, const char* argument);
void check_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* argument);
// Elements lie in the same order in both, so that their bytes may be moved as they are.
void check_same_format(const at::Tensor& tensor, const at::Tensor& other, const char* argument);
void check_numel(const at::Tensor& tensor, int64_t expected, const char* argument);
// One tensor for each rank, with the dtype of `mine`; this rank's own also has its numel.
void check_tensor_per_rank(const std::vector<at::Tensor>& tensors, int size, int rank,
                           const at::Tensor& mine, const char* argument);
// No output may share a byte with an input, unless both are the same memory at `in_place`, an index
// into both lists, of which one may be a single buffer; -1 for nowhere.
void check_overlap(const OpDesc& op, int in_place, const char* argument);
int check_rank(int64_t rank, int size, const char* argument);

// The one tensor of a list that must hold exactly one.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* argument);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    const char* argument);

Buffer buffer(const at::Tensor& tensor);
std::vector<Buffer> buffers(const std::vector<at::Tensor>& tensors);
// `count` equal pieces of a tensor along its first dimension, which must be the outermost in
// memory; its numel must be a multiple of `count`.
std::vector<Buffer> pieces(const at::Tensor& tensor, int count, const char* argument);
// Pieces of splits[r] rows each; empty splits mean equal ones.
std::vector<Buffer> pieces(const at::Tensor& tensor, const std::vector<int64_t>& splits, int count,
                           const char* argument);

// An op that moves values like the tensor's.
OpDesc moving_op(Collective collective, const at::Tensor& tensor);
// One that combines them.
OpDesc reducing_op(Collective collective, const ::c10d::ReduceOp& reduce_op,
                   const at::Tensor& tensor, const char* argument);

}  // namespace gpumode
