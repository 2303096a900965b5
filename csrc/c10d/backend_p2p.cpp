#include <utility>

#include "c10d/backend.h"
#include "c10d/tensors.h"

namespace gpumode {

template <class Describe>
Backend::WorkPtr Backend::run_or_refuse(Describe describe) {
  try {
    return run(describe());
  } catch (const c10::ValueError&) {
    refuse(std::current_exception());
    return aborted_work();
  }
}

// A lone send to oneself would wait for a receive that this thread, which waits, never calls.
void Backend::check_self(int peer, const char* problem) {
  if (peer != current_rank_) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(open_coalescing() != nullptr, problem, ", ", peer);
}

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  return run_or_refuse([&] {
    const auto& tensor = only(tensors, "tensors");
    auto op = moving_op(Collective::Send, tensor);
    op.peer = check_rank(peer, current_size_, "dst");
    check_self(op.peer, "dst: a rank can send to itself only in a batch with the receive");
    op.tag = tag;
    op.inputs = {buffer(tensor)};
    return Call{::c10d::OpType::SEND, "gpumode:send", {std::move(op)}, {tensor}, {}};
  });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  return run_or_refuse([&] {
    const auto& tensor = only(tensors, "tensors");
    auto op = moving_op(Collective::Recv, tensor);
    op.peer = check_rank(peer, current_size_, "src");
    check_self(op.peer, "src: a rank can receive from itself only in a batch with the send");
    op.tag = tag;
    op.outputs = {buffer(tensor)};
    return Call{::c10d::OpType::RECV, "gpumode:recv", {std::move(op)}, {}, {tensor}};
  });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return run_or_refuse([&] {
    const auto& tensor = only(tensors, "tensors");
    auto op = moving_op(Collective::Recv, tensor);
    op.peer = kAnySource;
    op.tag = tag;
    op.outputs = {buffer(tensor)};
    return Call{
        ::c10d::OpType::RECVANYSOURCE, "gpumode:recvAnySource", {std::move(op)}, {}, {tensor}};
  });
}

}  // namespace gpumode
