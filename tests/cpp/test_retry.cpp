// Reports and decisions as text, the rule, and retried ops of every kind on real host engines, with
// ranks that are threads.

#include <gtest/gtest.h>

#include <numeric>

#include "retry_group.h"

namespace gpumode {
namespace {

Report report(uint64_t committed, uint64_t open, bool complete) {
  Report r;
  r.committed = committed;
  r.open = open;
  r.complete = complete;
  return r;
}

TEST(Decide, PublishesWhatEverybodyHas) {
  // Nobody is known to have it, and somebody may: all were complete.
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {1, report(4, 5, true)}}).publish, 5u);
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {1, report(5, 0, false)}}).publish, 5u);
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {2, report(5, 6, false)}}).publish, 5u);
}

TEST(Decide, RedoesWhatOneHasNot) {
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {1, report(4, 5, false)}}).publish, 0u);
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {1, report(4, 0, false)}}).publish, 0u);
  EXPECT_EQ(decide({{0, report(4, 5, true)}, {1, report(3, 6, false)}}).publish, 0u);
  EXPECT_EQ(decide({{0, report(0, 0, false)}, {1, report(0, 0, false)}}).publish, 0u);
}

TEST(Decide, NamesWhoStartsOver) {
  Report restart = report(4, 0, false);
  restart.restarts = true;
  const Decision decision = decide({{0, report(4, 5, true)}, {3, restart}});
  EXPECT_EQ(decision.members, (std::vector<int>{0, 3}));
  EXPECT_EQ(decision.restarts, 3);
  EXPECT_EQ(decision.publish, 0u);
}

TEST(Decide, TextComesBack) {
  Report r = report(7, 8, true);
  r.restarts = true;
  const auto parsed = Report::parse(r.str());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->str(), r.str());
  for (const char* text : {"", "1", "2 7 8 1 1", "1 7 x 1 1", "1 7 8 3 1"}) {
    EXPECT_FALSE(Report::parse(text)) << text;
  }
  const Decision decision{{0, 2, 11}, 9, -1};
  const auto same = Decision::parse(decision.str());
  ASSERT_TRUE(same);
  EXPECT_EQ(same->str(), decision.str());
  EXPECT_EQ(same->members, decision.members);
  for (const char* text : {"", "1 9 -1", "1 9 -1 ", "1 9 -1 0,x", "2 9 -1 0", "1 9 -1 2,0"}) {
    EXPECT_FALSE(Decision::parse(text)) << text;
  }
}

// Runs an op, and returns who contributed.
std::vector<int> run_op(RetryGroup& group, int member, OpDesc part, Status* status = nullptr) {
  const auto retry = group.begin(member, std::move(part));
  retry->run();
  if (status != nullptr) {
    *status = retry->status();
  } else {
    EXPECT_TRUE(retry->status().ok()) << member << ": " << retry->status().str();
  }
  return group.contributors(member, *retry);
}

OpDesc desc(Collective collective) {
  OpDesc part;
  part.collective = collective;
  part.dtype = DType::I64;
  return part;
}

using Values = std::vector<int64_t>;

// Different for every rank and place.
Values values(int rank, int64_t salt, size_t count) {
  Values v(count);
  for (size_t i = 0; i < count; ++i) v[i] = (rank + 1) * 1000003 + salt * 7919 + int64_t(i) * 31;
  return v;
}

Values sum_of(const std::vector<int>& ranks, int64_t salt, size_t count) {
  Values total(count);
  for (int r : ranks) {
    const Values v = values(r, salt, count);
    for (size_t i = 0; i < count; ++i) total[i] += v[i];
  }
  return total;
}

// Everybody in a first op; then `victim` is gone, and the rest see to it that ops go on.
class AfterALoss : public ::testing::TestWithParam<size_t> {
 protected:
  static constexpr int kSize = 4, kVictim = 1;
  const std::vector<int> survivors_{0, 2, 3};

  AfterALoss() : group_(kSize) {
    group_.run([&](int r, Communicator&) {
      Values x = values(r, 0, 5);
      OpDesc op = desc(Collective::AllReduce);
      op.outputs = {buffer_of(x)};
      EXPECT_EQ(run_op(group_, r, op), (std::vector<int>{0, 1, 2, 3}));
      EXPECT_EQ(x, sum_of({0, 1, 2, 3}, 0, 5));
    });
    group_.kill(kVictim);
  }

  RetryGroup group_;
  const size_t count_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Sizes, AfterALoss, ::testing::Values(3, 100000));

TEST_P(AfterALoss, AllReduce) {
  group_.run([&](int r, Communicator&) {
    Values x = values(r, 1, count_);
    OpDesc op = desc(Collective::AllReduce);
    op.outputs = {buffer_of(x)};
    EXPECT_EQ(run_op(group_, r, op), survivors_);
    EXPECT_EQ(x, sum_of(survivors_, 1, count_));
  });
}

TEST_P(AfterALoss, ReduceToOneThatIsLeft) {
  group_.run([&](int r, Communicator&) {
    const Values mine = values(r, 1, count_);
    Values x = mine;
    OpDesc op = desc(Collective::Reduce);
    op.root = 2;
    op.outputs = {buffer_of(x)};
    EXPECT_EQ(run_op(group_, r, op), survivors_);
    EXPECT_EQ(x, r == 2 ? sum_of(survivors_, 1, count_) : mine);
  });
}

TEST_P(AfterALoss, BroadcastFromOneThatIsLeft) {
  group_.run([&](int r, Communicator&) {
    Values x = values(r, 1, count_);
    OpDesc op = desc(Collective::Broadcast);
    op.root = 3;
    op.outputs = {buffer_of(x)};
    run_op(group_, r, op);
    EXPECT_EQ(x, values(3, 1, count_));
  });
}

TEST_P(AfterALoss, BroadcastFromTheLost) {
  group_.run([&](int r, Communicator&) {
    Values x = values(r, 1, count_);
    OpDesc op = desc(Collective::Broadcast);
    op.root = kVictim;
    op.outputs = {buffer_of(x)};
    Status status;
    run_op(group_, r, op, &status);
    EXPECT_EQ(status.code, Code::PeerLost) << status.str();
    EXPECT_EQ(status.ranks, std::vector<int>{kVictim});
    EXPECT_EQ(x, values(r, 1, count_));
    op.root = 0;  // the group has been rebuilt
    run_op(group_, r, op);
    EXPECT_EQ(x, values(0, 1, count_));
  });
}

TEST_P(AfterALoss, AllGather) {
  group_.run([&](int r, Communicator&) {
    Values mine = values(r, 1, count_);
    std::vector<Values> all(kSize, Values(count_, -1));
    OpDesc op = desc(Collective::AllGather);
    op.inputs = {buffer_of(mine)};
    for (Values& each : all) op.outputs.push_back(buffer_of(each));
    run_op(group_, r, op);
    for (int q : survivors_) EXPECT_EQ(all[q], values(q, 1, count_));
    EXPECT_EQ(all[kVictim], Values(count_, -1));
  });
}

TEST_P(AfterALoss, ReduceScatter) {
  group_.run([&](int r, Communicator&) {
    std::vector<Values> pieces;
    for (int q = 0; q < kSize; ++q) pieces.push_back(values(r, 10 + q, count_));
    Values x(count_, -1);
    OpDesc op = desc(Collective::ReduceScatter);
    for (Values& each : pieces) op.inputs.push_back(buffer_of(each));
    op.outputs = {buffer_of(x)};
    run_op(group_, r, op);
    EXPECT_EQ(x, sum_of(survivors_, 10 + r, count_));
  });
}

TEST_P(AfterALoss, AllToAll) {
  group_.run([&](int r, Communicator&) {
    std::vector<Values> out, in(kSize, Values(count_, -1));
    for (int q = 0; q < kSize; ++q) out.push_back(values(r, 10 + q, count_));
    OpDesc op = desc(Collective::AllToAll);
    for (Values& each : out) op.inputs.push_back(buffer_of(each));
    for (Values& each : in) op.outputs.push_back(buffer_of(each));
    run_op(group_, r, op);
    for (int q : survivors_) EXPECT_EQ(in[q], values(q, 10 + r, count_));
    EXPECT_EQ(in[kVictim], Values(count_, -1));
  });
}

TEST_P(AfterALoss, GatherAndScatter) {
  group_.run([&](int r, Communicator& communicator) {
    Values mine = values(r, 1, count_);
    std::vector<Values> all(kSize, Values(count_, -1));
    OpDesc op = desc(Collective::Gather);
    op.root = 3;
    op.inputs = {buffer_of(mine)};
    for (Values& each : all) {
      if (r == 3) op.outputs.push_back(buffer_of(each));
    }
    run_op(group_, r, op);
    for (int q : survivors_) EXPECT_EQ(all[q], r == 3 ? values(q, 1, count_) : Values(count_, -1));

    // Here the ranks are the new ones already.
    std::vector<Values> pieces;
    for (int q = 0; q < 3; ++q) pieces.push_back(values(7, q, count_));
    op = desc(Collective::Scatter);
    op.root = 2;
    for (Values& each : pieces) {
      if (r == 3) op.inputs.push_back(buffer_of(each));
    }
    op.outputs = {buffer_of(mine)};
    run_op(group_, r, op);
    EXPECT_EQ(mine, values(7, communicator.rank(), count_));
  });
}

}  // namespace
}  // namespace gpumode
