#include "core/signature.h"

#include <algorithm>
#include <cstring>

#include "core/channel.h"

namespace gpumode {
namespace {

// Whether every rank must bring the same sizes.
bool has_equal_sizes(Collective collective) {
  return collective == Collective::Broadcast || is_reduction(collective);
}

// What the ranks must agree on in size: the buffers that every rank describes alike.
const std::vector<Buffer>& agreed_buffers(const OpDesc& part) {
  return part.collective == Collective::ReduceScatter ? part.inputs : part.outputs;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

uint64_t bits(double value) {
  uint64_t word;
  static_assert(sizeof(word) == sizeof(value), "");
  std::memcpy(&word, &value, sizeof(word));
  return word;
}

struct Fields {
  uint8_t collective, dtype, reduce_op, permuted;
  int32_t root;
};

Fields fields(const OpDesc& part) {
  const Collective c = part.collective;
  return {static_cast<uint8_t>(c),
          c == Collective::Barrier ? uint8_t{0} : static_cast<uint8_t>(part.dtype),
          is_reduction(c) ? static_cast<uint8_t>(part.reduce_op) : uint8_t{0},
          static_cast<uint8_t>(part.layout != 0), has_root(c) ? part.root : 0};
}

uint64_t mix(uint64_t hash, const OpDesc& part) {
  const Fields f = fields(part);
  hash = mix(hash, f.collective | f.dtype << 8 | f.reduce_op << 16 | f.permuted << 24 |
                       uint64_t(f.root) << 32);
  if (part.layout != 0) hash = mix(hash, part.layout);
  if (is_reduction(part.collective) && part.reduce_op == ReduceOp::PreMulSum) {
    hash = mix(hash, bits(part.factor));
  }
  if (has_equal_sizes(part.collective)) {
    for (const Buffer& buffer : agreed_buffers(part)) hash = mix(hash, buffer.nbytes);
  }
  return hash;
}

}  // namespace

Signature Signature::of(const std::vector<OpDesc>& parts) {
  Signature signature;
  signature.num_parts = static_cast<uint32_t>(parts.size());
  for (const OpDesc& part : parts) signature.rest = mix(signature.rest, part);
  if (parts.empty()) return signature;

  const OpDesc& first = parts.front();
  const Fields f = fields(first);
  signature.collective = f.collective;
  signature.dtype = f.dtype;
  signature.reduce_op = f.reduce_op;
  signature.permuted = f.permuted;
  signature.root = f.root;
  signature.commits = first.commits ? 1 : 0;
  if (has_equal_sizes(first.collective)) {
    size_t nbytes = 0;
    for (const Buffer& buffer : agreed_buffers(first)) nbytes += buffer.nbytes;
    signature.numel = nbytes / itemsize(first.dtype);
  }
  return signature;
}

bool Signature::operator==(const Signature& o) const {
  return collective == o.collective && dtype == o.dtype && reduce_op == o.reduce_op &&
         permuted == o.permuted && root == o.root && num_parts == o.num_parts &&
         commits == o.commits && numel == o.numel && rest == o.rest;
}

std::string Signature::str() const {
  const auto c = static_cast<Collective>(collective);
  std::string arguments;
  const auto add = [&](const std::string& text) {
    if (!arguments.empty()) arguments += ", ";
    arguments += text;
  };
  if (is_reduction(c)) add(name(static_cast<ReduceOp>(reduce_op)));
  if (has_root(c)) add("root " + std::to_string(root));
  if (c != Collective::Barrier) add(name(static_cast<DType>(dtype)));
  if (has_equal_sizes(c)) add(std::to_string(numel) + (numel == 1 ? " element" : " elements"));
  if (permuted != 0) add("not in the order of their indices");
  if (commits != 0) add("retry");

  std::string text = std::string(name(c)) + "(" + arguments + ")";
  if (num_parts > 1 && c != Collective::AllReduceSparse) {
    text += " coalesced with " + std::to_string(num_parts - 1) + " more";
  }
  return text;
}

Status mismatch(int my_rank, const Signature& mine, int their_rank, const Signature& theirs,
                uint64_t seq) {
  // In rank order, so that both sides say the same.
  const bool i_am_first = my_rank < their_rank;
  const std::string my_call = mine.str(), their_call = theirs.str();
  const int ranks[] = {std::min(my_rank, their_rank), std::max(my_rank, their_rank)};
  std::string text = "op " + std::to_string(seq) + " of the group: rank " +
                     std::to_string(ranks[0]) + " called " + (i_am_first ? my_call : their_call) +
                     ", rank " + std::to_string(ranks[1]) + " called " +
                     (i_am_first ? their_call : my_call);
  if (my_call == their_call) {
    text += mine.num_parts > 1 ? ", and the parts differ" : ", with other sizes or factors";
  }
  return Status(Code::Mismatch, text, {ranks[0], ranks[1]});
}

Agreement check_agreement(const Channel& channel, uint64_t seq, const Signature& mine) {
  Agreement agreement;
  for (int r = 0; r < channel.size(); ++r) {
    if (r == channel.rank()) continue;
    Signature theirs;
    if (!channel.entered(r, seq, &theirs)) {
      agreement.missing.push_back(r);
    } else if (theirs != mine && agreement.status.ok()) {
      agreement.status = mismatch(channel.rank(), mine, r, theirs, seq);
    }
  }
  agreement.complete = agreement.missing.empty();
  return agreement;
}

}  // namespace gpumode
