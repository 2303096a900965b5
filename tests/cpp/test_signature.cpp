#include "core/signature.h"

#include <gtest/gtest.h>

#include "sim_group.h"

namespace gpumode {
namespace {

Signature signature(const OpDesc& part) { return Signature::of({part}); }

OpDesc all_gather(DType dtype, size_t nbytes) {
  OpDesc desc;
  desc.collective = Collective::AllGather;
  desc.dtype = dtype;
  desc.inputs = {Buffer{nullptr, nbytes}};
  return desc;
}

TEST(Signature, EqualForTheSameCallElsewhere) {
  float here = 0, there = 0;
  OpDesc a = all_reduce(), b = all_reduce();
  a.outputs[0].data = &here;
  b.outputs[0].data = &there;
  EXPECT_EQ(signature(a), signature(b));
}

TEST(Signature, DiffersInWhatMustAgree) {
  const Signature reference = signature(all_reduce(8));
  EXPECT_NE(reference, signature(all_reduce(9)));
  EXPECT_NE(reference, signature(all_reduce(8, ReduceOp::Max)));
  OpDesc other = all_reduce(8);
  other.dtype = DType::I32;
  EXPECT_NE(reference, signature(other));
  other = all_reduce(8);
  other.collective = Collective::Reduce;
  EXPECT_NE(reference, signature(other));
  EXPECT_NE(signature(broadcast(8, 0)), signature(broadcast(8, 1)));
  OpDesc scaled = all_reduce(8, ReduceOp::PreMulSum), more = scaled;
  more.factor = 0.5;
  EXPECT_NE(signature(scaled), signature(more));
}

TEST(Signature, IgnoresWhatTheCollectiveDoesNotUse) {
  OpDesc barrier;
  OpDesc typed;
  typed.dtype = DType::F32;
  typed.root = 3;
  EXPECT_EQ(signature(barrier), signature(typed));
  OpDesc rooted = all_reduce(8);
  rooted.root = 3;
  rooted.factor = 2;
  EXPECT_EQ(signature(rooted), signature(all_reduce(8)));
}

TEST(Signature, OfASparseReductionIsReadAsOneCall) {
  OpDesc shapes = all_gather(DType::F32, 8);
  shapes.collective = Collective::AllReduceSparse;
  const std::vector<OpDesc> parts{shapes, all_gather(DType::I64, 8), all_gather(DType::F32, 4)};
  EXPECT_EQ(Signature::of(parts).str(), "all_reduce_sparse(float32)");
}

TEST(Signature, AllowsUnevenGathersOfOneDtype) {
  EXPECT_EQ(signature(all_gather(DType::F32, 4)), signature(all_gather(DType::F32, 400)));
  EXPECT_NE(signature(all_gather(DType::F32, 4)), signature(all_gather(DType::F16, 4)));
}

TEST(Signature, ComparesEverySizeOfAReduceScatter) {
  OpDesc a;
  a.collective = Collective::ReduceScatter;
  a.dtype = DType::F32;
  a.inputs = {Buffer{nullptr, 8}, Buffer{nullptr, 16}};
  a.outputs = {Buffer{nullptr, 8}};
  OpDesc b = a;
  b.outputs = {Buffer{nullptr, 16}};  // as the other rank describes the same call
  EXPECT_EQ(signature(a), signature(b));
  EXPECT_EQ(signature(a).numel, 6u);
  std::swap(b.inputs[0], b.inputs[1]);
  EXPECT_NE(signature(a), signature(b));
}

TEST(Signature, CoversEveryPart) {
  const Signature two = Signature::of({all_reduce(8), all_reduce(16)});
  EXPECT_NE(two, Signature::of({all_reduce(8)}));
  EXPECT_NE(two, Signature::of({all_reduce(8), all_reduce(17)}));
  EXPECT_EQ(two, Signature::of({all_reduce(8), all_reduce(16)}));
}

TEST(Signature, ReadsLikeTheCall) {
  EXPECT_EQ(signature(all_reduce(1024)).str(), "all_reduce(sum, float32, 1024 elements)");
  EXPECT_EQ(signature(broadcast(1, 2)).str(), "broadcast(root 2, float32, 1 element)");
  EXPECT_EQ(signature(all_gather(DType::BF16, 64)).str(), "all_gather(bfloat16)");
  EXPECT_EQ(signature(OpDesc()).str(), "barrier()");
  EXPECT_EQ(Signature::of({all_reduce(8), all_reduce(9), all_reduce(7)}).str(),
            "all_reduce(sum, float32, 8 elements) coalesced with 2 more");
}

TEST(Mismatch, NamesBothSidesInRankOrder) {
  const Signature a = signature(all_reduce(1024)), b = signature(broadcast(1024, 0));
  const Status seen_by_0 = mismatch(0, a, 2, b, 17);
  EXPECT_EQ(seen_by_0.code, Code::Mismatch);
  EXPECT_EQ(seen_by_0.message,
            "op 17 of the group: rank 0 called all_reduce(sum, float32, 1024 elements), rank 2 "
            "called broadcast(root 0, float32, 1024 elements)");
  EXPECT_EQ(seen_by_0.ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(mismatch(2, b, 0, a, 17).message, seen_by_0.message);
}

TEST(Mismatch, SaysSoWhenTheCallsReadAlike) {
  const Signature a = Signature::of({all_reduce(8), all_reduce(16)});
  const Signature b = Signature::of({all_reduce(8), all_reduce(17)});
  EXPECT_NE(mismatch(0, a, 1, b, 1).message.find("the parts differ"), std::string::npos);
}

class Agreement3 : public ::testing::Test {
 protected:
  Agreement3() : world({}), board(world.join(1, {0, 1, 2})) {
    for (int rank = 0; rank < 3; ++rank) channels.emplace_back(&world, board, rank);
  }
  SimWorld world;
  std::shared_ptr<SimWorld::Board> board;
  std::vector<SimChannel> channels;
};

TEST_F(Agreement3, IsCompleteOnceEverybodyEntered) {
  const Signature mine = signature(all_reduce());
  channels[0].announce(1, mine);
  EXPECT_EQ(check_agreement(channels[0], 1, mine).missing, (std::vector<int>{1, 2}));
  channels[2].announce(1, mine);
  const Agreement partial = check_agreement(channels[0], 1, mine);
  EXPECT_FALSE(partial.complete);
  EXPECT_EQ(partial.missing, std::vector<int>{1});
  channels[1].announce(1, mine);
  EXPECT_TRUE(check_agreement(channels[0], 1, mine).complete);
  EXPECT_TRUE(check_agreement(channels[0], 1, mine).status.ok());
}

TEST_F(Agreement3, SeesADifferenceBeforeEverybodyEntered) {
  const Signature mine = signature(all_reduce(8));
  channels[0].announce(1, mine);
  channels[2].announce(1, signature(all_reduce(9)));
  const Agreement agreement = check_agreement(channels[0], 1, mine);
  EXPECT_FALSE(agreement.complete);
  EXPECT_EQ(agreement.status.code, Code::Mismatch);
  EXPECT_EQ(agreement.status.ranks, (std::vector<int>{0, 2}));
}

}  // namespace
}  // namespace gpumode
