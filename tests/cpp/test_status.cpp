#include "core/status.h"

#include <gtest/gtest.h>

#include "core/op.h"

namespace gpumode {
namespace {

TEST(Status, SaysCodeAndMessage) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status().str(), "Ok");
  const Status lost(Code::PeerLost, "lost rank 2", {2});
  EXPECT_FALSE(lost.ok());
  EXPECT_EQ(lost.str(), "PeerLost: lost rank 2");
  EXPECT_EQ(lost.ranks, std::vector<int>{2});
}

TEST(Status, NamesRanks) {
  EXPECT_EQ(name_ranks({}), "no rank");
  EXPECT_EQ(name_ranks({3}), "rank 3");
  EXPECT_EQ(name_ranks({1, 2}), "ranks 1 and 2");
  EXPECT_EQ(name_ranks({1, 2, 5}), "ranks 1, 2 and 5");
}

TEST(Op, SupportsWhatTheDtypeDefines) {
  EXPECT_TRUE(supports(ReduceOp::Sum, DType::C64));
  EXPECT_FALSE(supports(ReduceOp::Max, DType::C64));  // complex numbers have no order
  EXPECT_TRUE(supports(ReduceOp::BXor, DType::I32));
  EXPECT_FALSE(supports(ReduceOp::BXor, DType::BF16));
  EXPECT_TRUE(supports(ReduceOp::Avg, DType::F16));
  EXPECT_FALSE(supports(ReduceOp::Avg, DType::Bool));
  EXPECT_TRUE(supports(ReduceOp::PreMulSum, DType::F64));
  EXPECT_FALSE(supports(ReduceOp::PreMulSum, DType::I64));
}

TEST(Op, KnowsTheSizeOfEveryDtype) {
  EXPECT_EQ(itemsize(DType::Bool), 1u);
  EXPECT_EQ(itemsize(DType::BF16), 2u);
  EXPECT_EQ(itemsize(DType::F32), 4u);
  EXPECT_EQ(itemsize(DType::C64), 8u);
  EXPECT_EQ(itemsize(DType::C128), 16u);
}

}  // namespace
}  // namespace gpumode
