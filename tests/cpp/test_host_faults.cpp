#include <algorithm>
#include <random>

#include "core/os/socket.h"
#include "host/endpoint.h"
#include "host_group.h"

namespace gpumode {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

OpDesc all_reduce(std::vector<float>& x) {
  OpDesc op;
  op.collective = Collective::AllReduce;
  op.dtype = DType::F32;
  op.outputs = {buffer_of(x)};
  return op;
}

TEST(HostFaults, AMemberThatLeavesIsLostToAllThatNeedIt) {
  constexpr int kSize = 5;
  HostGroup group(kSize, seconds(60));
  const TimePoint begin = Clock::now();
  group.run([&](int r, Communicator& c) {
    std::vector<float> x(4 << 20, 1.0f);
    for (int i = 0;; ++i) {
      if (r == 3 && i == 2) return group.kill(3);
      const Status status = submit(c, all_reduce(x))->status();
      if (status.ok()) continue;
      EXPECT_EQ(status.code, Code::PeerLost) << status.str();
      EXPECT_EQ(status.ranks, std::vector<int>{3});
      break;
    }
  });
  EXPECT_LT(Clock::now() - begin, seconds(30)) << "noticed by the deadline only";
}

TEST(HostFaults, AbortOnOneRankEndsTheOpOnAll) {
  HostGroup group(4, seconds(60));
  group.run([&](int r, Communicator& c) {
    std::vector<float> x(10);
    if (r == 0) {
      std::this_thread::sleep_for(milliseconds(20));
      c.abort({Code::Aborted, "enough"});
      return;
    }
    const Status status = submit(c, all_reduce(x))->status();
    EXPECT_EQ(status.code, Code::Aborted);
    EXPECT_NE(status.message.find("rank 0"), std::string::npos) << status.str();
    EXPECT_NE(status.message.find("enough"), std::string::npos) << status.str();
  });
  for (int r = 0; r < 4; ++r) EXPECT_EQ(group.rank(r).failure().code, Code::Aborted);
}

TEST(HostFaults, WhoComesAfterTheOthersGaveUpDoesNotSucceed) {
  HostGroup group(3, milliseconds(100));
  OpDesc barrier;
  barrier.collective = Collective::Barrier;
  group.run({0, 2}, [&](int, Communicator& c) {
    EXPECT_EQ(submit(c, barrier)->status().code, Code::Timeout);
  });
  // All have entered it by now, whatever became of them.
  EXPECT_EQ(submit(group.rank(1), barrier)->status().code, Code::Timeout);
}

TEST(HostFaults, WhatAllHaveEnteredSucceedsThoughOneAbortsNext) {
  HostGroup group(4, seconds(60));
  OpDesc barrier;
  barrier.collective = Collective::Barrier;
  for (int round = 1; round <= 200; ++round) {
    group.run([&](int r, Communicator& c) {
      EXPECT_TRUE(submit(c, barrier)->status().ok()) << "round " << round << ", rank " << r;
      if (r == round % 4) c.abort({Code::Aborted, "enough"});
    });
    group.rebuild(1 + round, {0, 1, 2, 3});
  }
}

TEST(HostFaults, BuildingSucceedsWhereAllAreThere) {
  // Members that are done close connections which others still look at.
  HostGroup group(6, seconds(60));
  for (int round = 1; round <= 300 && !HasFailure(); ++round) {
    group.rebuild(1 + round, {0, 1, 2, 3, 4, 5});
  }
}

TEST(HostFaults, AMemberThatNeverCallsIsNamedAtTheDeadline) {
  HostGroup group(3, milliseconds(200));
  group.run({0, 2}, [&](int, Communicator& c) {
    std::vector<float> x(10);
    const TimePoint begin = Clock::now();
    const Status status = submit(c, all_reduce(x))->status();
    EXPECT_EQ(status.code, Code::Timeout);
    EXPECT_NE(status.message.find("rank 1"), std::string::npos) << status.str();
    EXPECT_LT(Clock::now() - begin, milliseconds(1200));
  });
}

TEST(HostFaults, WhoIsMissingIsNamedByAnOpThatWaitsBehindAnother) {
  HostGroup group(3);
  group.run({0, 2}, [&](int, Communicator& c) {
    OpDesc barrier;
    submit(c, barrier, false);
    SubmitOptions options;
    options.timeout = milliseconds(100);
    const Status status = c.wait(c.submit({barrier}, std::move(options)));
    EXPECT_EQ(status.code, Code::Timeout);
    EXPECT_EQ(status.ranks, std::vector<int>{1}) << status.str();
  });
}

TEST(HostFaults, AnOpThatAllHaveFinishedSurvivesTheExitOfAMember) {
  for (int i = 0; i < 20; ++i) {
    HostGroup group(3);
    group.run([&](int r, Communicator& c) {
      std::vector<float> x(300000, 1.0f);
      const Status status = submit(c, all_reduce(x))->status();
      EXPECT_TRUE(status.ok()) << status.str();
      EXPECT_EQ(x[299999], 3.0f);
      group.kill(r);  // while others may still copy what this rank has published
    });
  }
}

TEST(HostRebuild, SurvivorsGoOnAgainAndAgain) {
  HostGroup group(6);
  std::vector<int> members = {0, 1, 2, 3, 4, 5};
  for (int64_t uuid = 2; members.size() > 1; ++uuid) {
    group.kill(members[members.size() / 2]);
    members.erase(members.begin() + static_cast<std::ptrdiff_t>(members.size() / 2));
    group.rebuild(uuid, members);
    group.run(members, [&](int, Communicator& c) {
      EXPECT_EQ(c.size(), static_cast<int>(members.size()));
      for (const size_t n : {3, 400000}) {
        std::vector<float> x(n, 2.0f);
        const Status status = submit(c, all_reduce(x))->status();
        EXPECT_TRUE(status.ok()) << status.str();
        EXPECT_EQ(x, std::vector<float>(n, 2.0f * static_cast<float>(members.size())));
      }
    });
  }
}

TEST(HostRebuild, ADeadMemberIsAnErrorAtOnceAndTheNextTryWorks) {
  HostGroup group(4);
  group.kill(1);
  Membership membership{2, {}};
  for (int r = 0; r < 4; ++r) membership.handles.push_back(group.handle(r));
  const TimePoint begin = Clock::now();
  group.run({0, 2, 3}, [&](int r, Communicator& c) {
    const Status status = c.rebuild(membership, r, seconds(60));
    EXPECT_EQ(status.code, Code::PeerLost) << status.str();
    std::vector<float> x(3);
    EXPECT_EQ(submit(c, all_reduce(x))->status().code, Code::PeerLost);
  });
  EXPECT_LT(Clock::now() - begin, seconds(30));
  group.rebuild(3, {0, 2, 3});
  group.run({0, 2, 3}, [&](int, Communicator& c) {
    std::vector<float> x(3, 1.0f);
    EXPECT_TRUE(submit(c, all_reduce(x))->status().ok());
    EXPECT_EQ(x[2], 3.0f);
  });
}

TEST(HostRebuild, AMemberThatDoesNotComeEndsTheTryAtTheDeadline) {
  HostGroup group(3);
  Membership membership{2, {}};
  for (int r = 0; r < 3; ++r) membership.handles.push_back(group.handle(r));
  group.run({0, 1}, [&](int r, Communicator& c) {
    const Status status = c.rebuild(membership, r, milliseconds(300));
    // Whose deadline is first gives up, which ends the other's try; nobody is dead.
    EXPECT_TRUE(status.code == Code::Timeout || status.code == Code::Aborted) << status.str();
  });
}

// It may be about to say that it belongs to a membership which we are told of next.
TEST(HostRebuild, WhoHasConnectedAndNotSpokenIsKeptAcrossMemberships) {
  HostGroup group(2);
  host::Address address;
  ASSERT_TRUE(host::Address::parse(group.handle(0), &address).ok());
  os::Fd stranger;
  ASSERT_TRUE(os::connect_local(address.socket, &stranger).ok());
  char byte = 0;
  os::Received received;
  for (int64_t uuid = 2; uuid < 5; ++uuid) {
    group.rebuild(uuid, {0, 1});
    ASSERT_TRUE(os::receive_message(stranger, &byte, 1, &received).ok());
    EXPECT_LT(received.nbytes, 0) << "closed in the rebuild to membership " << uuid;
  }
}

TEST(HostRebuild, WhoIsAMembershipAheadWaitsForTheOthers) {
  HostGroup group(3);
  Membership pair{0, {group.handle(0), group.handle(1)}};
  Membership all{0, {group.handle(0), group.handle(1), group.handle(2)}};
  for (int64_t uuid = 2; uuid < 400 && !HasFailure(); uuid += 2) {
    pair.uuid = uuid;
    all.uuid = uuid + 1;
    group.run([&](int r, Communicator& c) {
      if (r != 2) {
        const Status status = c.rebuild(pair, r, seconds(60));
        EXPECT_TRUE(status.ok()) << status.str();
      }
      const Status status = c.rebuild(all, r, seconds(60));
      EXPECT_TRUE(status.ok()) << status.str();
    });
  }
}

TEST(HostRebuild, RefusesHandlesThatAreNone) {
  HostGroup group(2);
  for (const std::string& bad :
       {std::string(), std::string("gpumode1/0/x"), std::string(5000, '/')}) {
    Membership membership{2, {group.handle(0), bad}};
    EXPECT_EQ(group.rank(0).rebuild(membership, 0, seconds(5)).code, Code::InvalidArgument);
  }
  Membership not_mine{3, {group.handle(1)}};
  EXPECT_EQ(group.rank(0).rebuild(not_mine, 0, seconds(5)).code, Code::InvalidArgument);
}

// Aborts at random moments, then a rebuild: bytes of an aborted op must never reach a later one.
TEST(HostRebuild, NothingOfAnAbortedOpReachesTheNextEpoch) {
  constexpr int kSize = 3;
  HostGroup group(kSize);
  std::mt19937 random(5);
  for (int64_t uuid = 2; uuid < 25; ++uuid) {
    const int aborter = static_cast<int>(random() % kSize);
    const auto delay = std::chrono::microseconds(random() % 3000);
    group.run([&](int r, Communicator& c) {
      std::vector<float> x(300000, static_cast<float>(uuid));
      auto op = submit(c, all_reduce(x), false);
      if (r == aborter) {
        std::this_thread::sleep_for(delay);
        c.abort({Code::Aborted, "test"});
      }
      c.wait(op);
      EXPECT_TRUE(op->done());
    });
    group.rebuild(uuid, {0, 1, 2});
    group.run([&](int r, Communicator& c) {
      std::vector<float> x(300000, static_cast<float>(r + 1));
      const Status status = submit(c, all_reduce(x))->status();
      EXPECT_TRUE(status.ok()) << status.str();
      EXPECT_EQ(x, std::vector<float>(x.size(), 6.0f));
    });
  }
}

}  // namespace
}  // namespace gpumode
