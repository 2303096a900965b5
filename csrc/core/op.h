#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/status.h"

namespace gpumode {

enum class Collective : uint8_t {
  Broadcast,
  AllReduce,
  Reduce,
  AllGather,
  ReduceScatter,
  Gather,
  Scatter,
  AllToAll,
  Barrier,
  Send,
  Recv,
  AllReduceSparse,
};

enum class DType : uint8_t {
  F16,
  BF16,
  F32,
  F64,
  I8,
  U8,
  I16,
  U16,
  I32,
  U32,
  I64,
  U64,
  Bool,
  C64,
  C128,
  // What follows moves, and does not reduce.
  C32,
  F8E4M3FN,
  F8E4M3FNUZ,
  F8E5M2,
  F8E5M2FNUZ,
  F8E8M0FNU,
  F4E2M1FNx2,
};

// PreMulSum multiplies each input by OpDesc::factor before it is summed.
enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max, BAnd, BOr, BXor, PreMulSum };

const char* name(Collective collective);
const char* name(DType dtype);
const char* name(ReduceOp op);
size_t itemsize(DType dtype);
bool is_p2p(Collective collective);
bool has_root(Collective collective);
// Whether the collective combines values, so that ReduceOp and DType matter to it.
bool is_reduction(Collective collective);
// Whether values of the type can be reduced at all.
bool is_reducible(DType dtype);
// Whether `op` is defined for `dtype` (no order on complex numbers, no bits in floats, ...).
bool supports(ReduceOp op, DType dtype);

struct Buffer {
  void* data = nullptr;
  size_t nbytes = 0;
};

constexpr int kAnySource = -1;

// One collective or point-to-point transfer over dense memory.
//
//   Broadcast      outputs[0] on every rank; the root's is sent
//   AllReduce      outputs[0], in place, or from inputs[0] if there is one
//   Reduce         the same; outputs[0] is changed on the root only
//   AllGather      inputs[0]; outputs[r] receives rank r's input, sizes may differ
//   ReduceScatter  inputs[r] goes to rank r; outputs[0]
//   Gather         inputs[0]; on the root outputs[r]
//   Scatter        on the root inputs[r]; outputs[0]
//   AllToAll       inputs[r] goes to rank r; outputs[r] comes from rank r, sizes may differ
//   Barrier        nothing
//   AllReduceSparse  as AllGather, of what describes each rank's tensor; AllGathers of the indices
//                  and values follow in the same op, and each rank adds them up for itself
//   Send           inputs[0] to peer; Recv: outputs[0] from peer, or from kAnySource
//
// An input may be the output at the same place (in place), or must not overlap it.
struct OpDesc {
  Collective collective = Collective::Barrier;
  DType dtype = DType::U8;
  ReduceOp reduce_op = ReduceOp::Sum;
  double factor = 1.0;  // PreMulSum only
  // In which order elements lie in memory: 0 for that of their indices, any number for another one.
  // It must be the same on all members, since bytes are combined as they lie.
  uint64_t layout = 0;
  int root = 0;
  int peer = 0;
  int tag = 0;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  // If set, called when the parts of the op before this one are done, and before this one starts:
  // it may set the buffers, whose sizes these parts have brought. It must not wait; an error ends
  // the op. Collectives only.
  std::function<Status(OpDesc*)> prepare;
  // Whether the op succeeds only when every member has told all others that its part is done: see
  // Op::complete. Of a coalesced op the first part's counts, and must be the same on all members.
  bool commits = false;
};

// Which try of which op of which membership. Bytes with another tag than the one waited for
// belong to an aborted attempt and are dropped.
//
// Collectives are numbered 1, 2, ... within an epoch; point-to-point ops have a numbering of their
// own, with kPointToPoint set, since members need not issue the same ones.
struct Tag {
  static constexpr uint64_t kPointToPoint = uint64_t{1} << 63;

  uint32_t epoch = 0;
  uint32_t attempt = 0;
  uint64_t seq = 0;

  bool p2p() const { return (seq & kPointToPoint) != 0; }

  bool operator==(const Tag& o) const {
    return epoch == o.epoch && attempt == o.attempt && seq == o.seq;
  }
  bool operator!=(const Tag& o) const { return !(*this == o); }
};

}  // namespace gpumode
