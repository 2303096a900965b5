#include <utility>

#include "c10d/backend.h"
#include "c10d/tensors.h"

namespace gpumode {

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  const auto& tensor = only(tensors, "tensors");
  auto op = moving_op(Collective::Send, tensor);
  op.peer = check_rank(peer, current_size_, "dst");
  TORCH_CHECK_VALUE(op.peer != current_rank_, "dst: a rank cannot send to itself, ", peer);
  op.tag = tag;
  op.inputs = {buffer(tensor)};
  return run({::c10d::OpType::SEND, "gpumode:send", {std::move(op)}, {tensor}, {}});
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  const auto& tensor = only(tensors, "tensors");
  auto op = moving_op(Collective::Recv, tensor);
  op.peer = check_rank(peer, current_size_, "src");
  TORCH_CHECK_VALUE(op.peer != current_rank_, "src: a rank cannot receive from itself, ", peer);
  op.tag = tag;
  op.outputs = {buffer(tensor)};
  return run({::c10d::OpType::RECV, "gpumode:recv", {std::move(op)}, {}, {tensor}});
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  const auto& tensor = only(tensors, "tensors");
  auto op = moving_op(Collective::Recv, tensor);
  op.peer = kAnySource;
  op.tag = tag;
  op.outputs = {buffer(tensor)};
  return run(
      {::c10d::OpType::RECVANYSOURCE, "gpumode:recvAnySource", {std::move(op)}, {}, {tensor}});
}

}  // namespace gpumode
