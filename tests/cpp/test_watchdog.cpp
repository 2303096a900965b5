#include "core/watchdog.h"

#include <gtest/gtest.h>

#include "sim_group.h"

namespace gpumode {
namespace {

// Rank 0 of three, in virtual time, with op 1 started and polled: it waits for ranks 1 and 2.
class WatchdogTest : public ::testing::Test {
 protected:
  WatchdogTest() : world({}), engine(&world, 0) {
    Membership membership;
    membership.uuid = 1;
    for (int member = 0; member < 3; ++member) {
      membership.handles.push_back(FakeEngine(&world, member).handle());
    }
    EXPECT_TRUE(engine.rebuild(membership, 0, TimePoint::max()).ok());
    board = world.join(1, {0, 1, 2});
    op.tag = Tag{1, 0, 1};
    op.collective = Collective::AllReduce;
    op.timeout = milliseconds(500);
    op.deadline = world.now() + op.timeout;
    EXPECT_TRUE(engine.start(op.tag, {all_reduce()}, Lane()).ok());
    poll();
    watchdog.reset(3);
  }

  void poll() {
    std::vector<Completion> finished;
    engine.poll(&finished);
  }
  void enter(int rank) {
    SimChannel(&world, board, rank).announce(1, Signature::of({all_reduce()}));
  }
  Verdict check() { return watchdog.check(engine, *engine.channel(), {op}); }
  Verdict poll_and_check() {
    poll();
    return check();
  }

  SimWorld world;
  FakeEngine engine;
  std::shared_ptr<SimWorld::Board> board;
  Watchdog watchdog;
  WatchedOp op;
};

TEST_F(WatchdogTest, IsSilentWhileNothingIsWrong) {
  const Verdict verdict = check();
  EXPECT_TRUE(verdict.status.ok());
  EXPECT_FALSE(verdict.again);
}

TEST_F(WatchdogTest, NamesTheMissingRanksAtTheDeadline) {
  enter(2);
  EXPECT_TRUE(poll_and_check().status.ok());
  world.run([&] { return world.now() >= op.deadline; }, seconds(1));
  const Verdict verdict = check();
  EXPECT_EQ(verdict.status.code, Code::Timeout);
  EXPECT_FALSE(verdict.learned);
  EXPECT_EQ(verdict.status.ranks, std::vector<int>{1});
  EXPECT_EQ(verdict.status.message,
            "op 1, all_reduce, timed out: its timeout of 0.5 s passed while it waited for rank 1");
}

TEST_F(WatchdogTest, ADeathCountsAfterOneMorePoll) {
  world.kill(1);
  const Verdict first = check();
  EXPECT_TRUE(first.status.ok());
  EXPECT_TRUE(first.again);
  const Verdict second = poll_and_check();
  EXPECT_EQ(second.status.code, Code::PeerLost);
  EXPECT_EQ(second.status.ranks, std::vector<int>{1});
  EXPECT_EQ(second.status.message, "lost rank 1, which op 1, all_reduce, waits for");
}

TEST_F(WatchdogTest, WhatTheDeadHadSentStillCounts) {
  world.kill(1);
  EXPECT_TRUE(check().again);
  enter(1);  // its last word, seen by the next poll only
  const Verdict verdict = poll_and_check();
  EXPECT_TRUE(verdict.status.ok());
  EXPECT_FALSE(verdict.again);
}

TEST_F(WatchdogTest, NamesEveryDeadRankThatIsWaitedFor) {
  world.kill(1);
  world.kill(2);
  EXPECT_TRUE(check().again);
  EXPECT_EQ(poll_and_check().status.ranks, (std::vector<int>{1, 2}));
}

TEST_F(WatchdogTest, APatientOpWaitsForTheLivingAndThenNamesTheDead) {
  op.patient = true;
  world.kill(1);
  EXPECT_TRUE(check().again);
  EXPECT_TRUE(poll_and_check().status.ok());
  enter(2);
  const Verdict verdict = poll_and_check();
  EXPECT_EQ(verdict.status.code, Code::PeerLost);
  EXPECT_EQ(verdict.status.ranks, std::vector<int>{1});
}

TEST_F(WatchdogTest, APatientOpNamesAllThatAreMissingAtTheDeadline) {
  op.patient = true;
  world.kill(1);
  EXPECT_TRUE(check().again);
  EXPECT_TRUE(poll_and_check().status.ok());
  world.run([&] { return world.now() >= op.deadline; }, seconds(1));
  const Verdict verdict = poll_and_check();
  EXPECT_EQ(verdict.status.code, Code::Timeout);
  EXPECT_EQ(verdict.status.ranks, (std::vector<int>{1, 2}));
}

TEST_F(WatchdogTest, PassesOnWhatAMemberSaid) {
  world.kill(2);  // a consequence, and less telling
  SimChannel(&world, board, 1).announce_failure(Status(Code::Aborted, "rank 1: enough", {1}), 1);
  EXPECT_TRUE(check().again);  // its last bytes may be on their way
  const Verdict verdict = poll_and_check();
  EXPECT_EQ(verdict.status.code, Code::Aborted);
  EXPECT_EQ(verdict.status.message, "rank 1: enough");
  EXPECT_TRUE(verdict.learned);
}

TEST_F(WatchdogTest, KnowsWhichOpsAMemberHadFinished) {
  SimChannel(&world, board, 1).announce_failure(Status(Code::Aborted, "enough"), 3);
  EXPECT_TRUE(given_up(*engine.channel(), 2).ok());
  EXPECT_EQ(given_up(*engine.channel(), 3).code, Code::Aborted);
  EXPECT_EQ(given_up(*engine.channel(), 4).code, Code::Aborted);
}

TEST_F(WatchdogTest, HasNothingToSayOfAnIdleGroup) {
  world.kill(1);
  SimChannel(&world, board, 2).announce_failure(Status(Code::Aborted, "rank 2: enough"), 1);
  EXPECT_TRUE(watchdog.check(engine, *engine.channel(), {}).status.ok());
}

}  // namespace
}  // namespace gpumode
