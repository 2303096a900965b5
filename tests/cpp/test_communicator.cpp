#include "core/communicator.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "sim_group.h"

namespace gpumode {
namespace {

constexpr SimWorld::Options kReal{SimWorld::Time::Real};
constexpr Duration kLong = seconds(30);  // never reached unless something is broken

SubmitOptions blocking() {
  SubmitOptions options;
  options.blocking = true;
  return options;
}

SubmitOptions within(Duration timeout) {
  SubmitOptions options;
  options.timeout = timeout;
  return options;
}

Communicator::Options no_worker() {
  Communicator::Options options;
  options.worker = false;
  return options;
}

// Runs `body(member)` on a thread of each member.
template <typename Body>
void on_every_member(int size, Body body) {
  std::vector<std::thread> threads;
  for (int member = 0; member < size; ++member) {
    threads.emplace_back([&body, member] { body(member); });
  }
  for (std::thread& thread : threads) thread.join();
}

// What `communicator` learns when it goes on. Op 1 may still end well, since everybody is in it.
Status learn(Communicator* communicator) {
  communicator->submit({all_reduce()}, blocking());
  return communicator->submit({all_reduce()}, blocking())->status();
}

TEST(Communicator, BlockingOpsEndOnTheCallersThread) {
  SimGroup group(3, kReal, no_worker());
  on_every_member(3, [&](int member) {
    for (int i = 0; i < 100; ++i) {
      const auto op = group[member].submit({all_reduce()}, blocking());
      ASSERT_TRUE(op->done());
      ASSERT_TRUE(op->status().ok()) << op->status().str();
    }
  });
  EXPECT_EQ(group[1].sequence_number(), 100u);
}

TEST(Communicator, TheWorkerFinishesWhatNobodyWaitsFor) {
  SimGroup group(2, kReal);
  for (int round = 0; round < 3; ++round) {  // the worker is new, then woken
    std::vector<std::promise<void>> done(2);
    for (int member : {0, 1}) {
      const auto op = group[member].submit({all_reduce()}, {});
      op->on_done([&done, member] { done[member].set_value(); });
    }
    for (auto& promise : done) {
      ASSERT_EQ(promise.get_future().wait_for(kLong), std::future_status::ready);
    }
    std::this_thread::sleep_for(milliseconds(2));  // so that the worker sleeps
  }
}

TEST(Communicator, NumbersCollectivesAndTransfersApart) {
  SimGroup group(2, kReal);
  const auto first = group[0].submit({all_reduce()}, {});
  const auto sent = group[0].submit({send_to(1)}, {});
  const auto second = group[0].submit({all_reduce()}, {});
  EXPECT_EQ(first->tag(), (Tag{1, 0, 1}));
  EXPECT_EQ(sent->tag(), (Tag{1, 0, 1 | Tag::kPointToPoint}));
  EXPECT_EQ(second->tag(), (Tag{1, 0, 2}));
  EXPECT_EQ(group[0].sequence_number(), 2u);
}

TEST(Communicator, ASendIsDoneWhenSubmitReturns) {
  SimGroup group(2, kReal, no_worker());
  EXPECT_TRUE(group[0].submit({send_to(1, 7)}, {})->done());
  const auto received = group[1].submit({recv_from(kAnySource, 7)}, {});
  ASSERT_TRUE(received->done());
  EXPECT_EQ(received->source_rank(), 0);
}

TEST(Communicator, CallbacksRunOnceAndBuffersAreReleased) {
  SimGroup group(2, kReal, no_worker());
  auto buffer = std::make_shared<int>();
  SubmitOptions options;
  options.keepalive = buffer;
  const auto op = group[0].submit({all_reduce()}, options);
  options.keepalive.reset();
  int calls = 0;
  op->on_done([&] {
    EXPECT_TRUE(op->done());
    EXPECT_EQ(buffer.use_count(), 1);
    ++calls;
  });
  EXPECT_EQ(buffer.use_count(), 2);
  const auto other = group[1].submit({all_reduce()}, {});
  EXPECT_TRUE(group[0].wait(op).ok());
  EXPECT_EQ(calls, 1);
  op->on_done([&] { ++calls; });  // at once, since the op is done
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(group[1].wait(other).ok());
}

TEST(Communicator, ARefusedOpTakesNoNumberAndChangesNothing) {
  SimGroup group(1, kReal);
  group.engines[0]->inject(1, {Fault::Kind::Refuse, Status(Code::InvalidArgument, "root: 7")});
  const auto op = group[0].submit({broadcast(8, 7)}, {});
  EXPECT_EQ(op->status().code, Code::InvalidArgument);
  EXPECT_TRUE(group[0].failure().ok());
  EXPECT_EQ(group[0].sequence_number(), 0u);
  EXPECT_EQ(group[0].submit({}, {})->status().code, Code::InvalidArgument);
}

TEST(Communicator, AnEngineThatCannotStartFailsTheGroup) {
  SimGroup group(2, kReal);
  group.engines[0]->inject(2, {Fault::Kind::Refuse, Status(Code::Internal, "no memory")});
  const auto before = group[0].submit({all_reduce()}, {});
  const auto op = group[0].submit({all_reduce()}, {});
  EXPECT_EQ(op->status().code, Code::Internal);
  EXPECT_EQ(group[0].wait(before).code, Code::Internal);
  EXPECT_EQ(group[0].failure().code, Code::Internal);
  const Status learned = learn(&group[1]);
  EXPECT_EQ(learned.code, Code::Internal);
  EXPECT_EQ(learned.message, "no memory (from rank 0)");
}

TEST(Communicator, AWaitThatTimesOutLeavesTheOpInFlight) {
  SimGroup group(2, kReal);
  const auto op = group[0].submit({all_reduce()}, {});
  EXPECT_EQ(group[0].wait(op, milliseconds(20)).code, Code::Timeout);
  EXPECT_FALSE(op->done());
  EXPECT_TRUE(group[0].failure().ok());
  EXPECT_TRUE(group[1].submit({all_reduce()}, blocking())->status().ok());
  EXPECT_TRUE(group[0].wait(op, kLong).ok());
}

TEST(Communicator, ADeadlineFailsTheGroupEverywhere) {
  SimGroup group(3, kReal);
  const auto op = group[0].submit({all_reduce()}, within(milliseconds(50)));
  const auto other = group[1].submit({all_reduce()}, within(kLong));
  const Status status = group[0].wait(op);
  EXPECT_EQ(status.code, Code::Timeout);
  EXPECT_EQ(status.ranks, std::vector<int>{2});
  EXPECT_LT(op->finished_at() - op->started_at(), milliseconds(1050));
  const Status learned = group[1].wait(other);
  EXPECT_EQ(learned.code, Code::Timeout);
  EXPECT_EQ(learned.message, status.message + " (from rank 0)");
}

TEST(Communicator, ADeadlineHoldsWhileOtherOpsMove) {
  SimGroup group(2, kReal, no_worker());
  const auto stuck = group[0].submit({all_reduce()}, within(milliseconds(100)));
  while (!stuck->done()) {
    group[0].submit({send_to(1)}, {});
    ASSERT_LT(Clock::now() - stuck->started_at(), milliseconds(1100));
  }
  EXPECT_EQ(stuck->status().code, Code::Timeout);
}

TEST(Communicator, ADeadPeerIsNoticedAtOnce) {
  SimGroup group(3, kReal);
  const auto op = group[0].submit({all_reduce()}, {});
  const auto other = group[1].submit({all_reduce()}, {});
  group.world.kill(2);
  for (const Status& status : {group[0].wait(op), group[1].wait(other)}) {
    EXPECT_EQ(status.code, Code::PeerLost);
    EXPECT_EQ(status.ranks, std::vector<int>{2});
  }
  EXPECT_LT(op->finished_at() - op->started_at(), seconds(10));
}

TEST(Communicator, APeerThatFinishedAndLeftIsNoFailure) {
  SimGroup group(2, kReal, no_worker());
  group[0].submit({send_to(1)}, {});
  group.world.kill(0);
  EXPECT_TRUE(group[1].submit({recv_from(0)}, blocking())->status().ok());
  EXPECT_TRUE(group[1].failure().ok());
}

TEST(Communicator, ARingOfTransfersLearnsOfADeath) {
  SimGroup group(4, kReal);
  std::vector<std::shared_ptr<Op>> ops;
  for (int member : {0, 1, 3}) {
    ops.push_back(group[member].submit({recv_from((member + 3) % 4)}, {}));
  }
  group.world.kill(2);
  for (size_t i = 0; i < ops.size(); ++i) {
    const Status status = group[i < 2 ? static_cast<int>(i) : 3].wait(ops[i]);
    EXPECT_EQ(status.code, Code::PeerLost);
    EXPECT_EQ(status.ranks, std::vector<int>{2});
  }
}

TEST(Communicator, AMismatchReachesEveryMember) {
  SimGroup group(3, kReal);
  std::vector<Status> status(3);
  on_every_member(3, [&](int member) {
    const OpDesc desc = member == 2 ? broadcast(1024, 0) : all_reduce(1024);
    status[member] = group[member].submit({desc}, blocking())->status();
  });
  for (const Status& s : status) {
    EXPECT_EQ(s.code, Code::Mismatch);
    EXPECT_NE(s.message.find("all_reduce(sum, float32, 1024 elements)"), std::string::npos);
    EXPECT_NE(s.message.find("rank 2 called broadcast"), std::string::npos);
  }
}

TEST(Communicator, StaysFailedUntilRebuilt) {
  SimGroup group(2, kReal);
  group[0].abort(Status(Code::Aborted, "enough"));
  group[0].abort(Status(Code::Internal, "too late to matter"));
  const auto op = group[0].submit({all_reduce()}, {});
  ASSERT_TRUE(op->done());
  EXPECT_EQ(op->status().message, "enough");
  EXPECT_EQ(group[1].submit({all_reduce()}, blocking())->status().message, "enough (from rank 0)");

  for (int member : {0, 1}) EXPECT_TRUE(group.rebuild(member, 0x100000002, {0, 1}).ok());
  const auto fresh = group[0].submit({all_reduce()}, {});
  EXPECT_EQ(fresh->tag(), (Tag{2, 0, 1}));  // the low half of the uuid, and numbers start again
  EXPECT_TRUE(group[1].submit({all_reduce()}, blocking())->status().ok());
  EXPECT_TRUE(group[0].wait(fresh).ok());
}

TEST(Communicator, SurvivorsRebuildWithoutTheDead) {
  SimGroup group(3, kReal);
  const auto op = group[0].submit({all_reduce()}, {});
  group.world.kill(1);
  EXPECT_EQ(group[0].wait(op).code, Code::PeerLost);
  EXPECT_EQ(group.rebuild(0, 2, {0, 1, 2}).code, Code::PeerLost);  // rank 1 is still listed
  EXPECT_EQ(group[0].size(), 0);
  EXPECT_EQ(group[0].submit({all_reduce()}, {})->status().code, Code::PeerLost);
  for (int member : {0, 2}) EXPECT_TRUE(group.rebuild(member, 3, {0, 2}).ok());
  EXPECT_EQ(group[2].rank(), 1);
  EXPECT_EQ(group[2].size(), 2);
  const auto redo = group[0].submit({all_reduce()}, {});
  EXPECT_TRUE(group[2].submit({all_reduce()}, blocking())->status().ok());
  EXPECT_TRUE(group[0].wait(redo).ok());
}

TEST(Communicator, ARebuildEndsWhatIsInFlight) {
  SimGroup group(2, kReal);
  const auto op = group[0].submit({all_reduce()}, {});
  EXPECT_TRUE(group.rebuild(0, 2, {0, 1}).ok());
  EXPECT_EQ(op->status().code, Code::Aborted);
  EXPECT_EQ(learn(&group[1]).message, "the group was rebuilt (from rank 0)");
}

TEST(Communicator, IsClosedBeforeTheFirstRebuild) {
  SimWorld world(kReal);
  Communicator communicator(std::make_unique<FakeEngine>(&world, 0), {});
  EXPECT_EQ(communicator.rank(), -1);
  EXPECT_FALSE(communicator.drive());
  communicator.abort(Status(Code::Aborted, "nothing to abort"));
  EXPECT_EQ(communicator.submit({all_reduce()}, {})->status().code, Code::InvalidArgument);
}

TEST(Communicator, AnOpOutlivesItsCommunicator) {
  SimGroup group(2, kReal);
  const auto op = group[0].submit({all_reduce()}, {});
  group.members[0].reset();
  ASSERT_TRUE(op->done());
  EXPECT_EQ(op->status().code, Code::Aborted);
  EXPECT_EQ(learn(&group[1]).message, "rank 0 left the group with ops in flight");
}

TEST(Communicator, LeavingAnIdleGroupIsSilent) {
  SimGroup group(2, kReal);
  group[0].submit({send_to(1)}, {});
  group.members[0].reset();
  EXPECT_TRUE(group[1].submit({recv_from(0)}, blocking())->status().ok());
}

TEST(Communicator, ACallbackMaySubmitAndAbortButNotWait) {
  SimGroup group(2, kReal);
  std::promise<Status> waited;
  std::shared_ptr<Op> next;
  const auto op = group[0].submit({recv_from(1)}, {});
  op->on_done([&] {
    next = group[0].submit({all_reduce()}, blocking());  // as if it were not
    waited.set_value(group[0].wait(next));
    group[0].abort(Status(Code::Aborted, "from a callback"));
  });
  group[1].submit({send_to(0)}, {});
  EXPECT_EQ(waited.get_future().get().code, Code::InvalidArgument);
  EXPECT_EQ(group[0].wait(next).message, "from a callback");
}

// ------------------------------------------------------------------------------------ threads

TEST(CommunicatorThreads, AWaiterHandsOverToTheNext) {
  SimGroup group(2, kReal, no_worker());  // no worker would come to the rescue
  const auto op = group[0].submit({all_reduce()}, {});
  std::thread impatient(
      [&] { EXPECT_EQ(group[0].wait(op, milliseconds(50)).code, Code::Timeout); });
  std::thread patient([&] { EXPECT_TRUE(group[0].wait(op, kLong).ok()); });
  impatient.join();
  EXPECT_TRUE(group[1].submit({all_reduce()}, blocking())->status().ok());
  patient.join();
}

TEST(CommunicatorThreads, AWaiterHandsOverToTheWorker) {
  SimGroup group(2, kReal);
  std::promise<void> done;
  const auto left_behind = group[0].submit({recv_from(1, 2)}, {});
  left_behind->on_done([&] { done.set_value(); });
  group[1].submit({send_to(0, 1)}, {});
  EXPECT_TRUE(group[0].submit({recv_from(1, 1)}, blocking())->status().ok());
  group[1].submit({send_to(0, 2)}, {});
  EXPECT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
}

// A waiter whose op was finished by the driver wakes up when the role is free, and must not go
// away with it while ops are left for the worker.
TEST(CommunicatorThreads, AWaiterThatNeverDroveHandsOverToo) {
  for (int round = 0; round < 30; ++round) {
    SimGroup group(2, kReal);
    std::promise<void> done;
    std::thread first([&] { group[0].submit({recv_from(1, 1)}, blocking()); });
    std::this_thread::sleep_for(milliseconds(1));  // most likely it drives now
    const auto left_behind = group[0].submit({recv_from(1, 3)}, {});
    left_behind->on_done([&] { done.set_value(); });
    std::thread second([&] { group[0].submit({recv_from(1, 2)}, blocking()); });
    std::this_thread::sleep_for(milliseconds(1));
    group[1].submit({send_to(0, 1), send_to(0, 2)}, {});
    first.join();
    second.join();
    group[1].submit({send_to(0, 3)}, {});
    ASSERT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
  }
}

TEST(CommunicatorThreads, AbortFromAnotherThreadWhileSubmitting) {
  for (int round = 0; round < 200; ++round) {
    SimGroup group(2, kReal);
    std::thread peer([&] {
      while (group[1].submit({all_reduce()}, blocking())->status().ok()) {
      }
    });
    std::thread aborter([&, round] {
      std::this_thread::sleep_for(microseconds(round));
      group[0].abort(Status(Code::Aborted, "from another thread"));
      EXPECT_EQ(group[0].failure().code, Code::Aborted);
    });
    Status status;
    for (int i = 0; status.ok(); ++i) {
      const auto op = group[0].submit({all_reduce()}, i % 2 ? blocking() : SubmitOptions());
      if (op->done()) status = op->status();
    }
    EXPECT_EQ(status.code, Code::Aborted);
    aborter.join();
    peer.join();
  }
}

// Several threads of each member submit, wait and let go, until somebody aborts.
TEST(CommunicatorThreads, EveryOpOfAStormEnds) {
  constexpr int kMembers = 2, kThreads = 3;
  for (int round = 0; round < 20; ++round) {
    SimGroup group(kMembers, kReal);
    std::atomic<int> submitted{0}, finished{0};
    std::atomic<int> failures{0};
    const auto submitter = [&](int member, int thread) {
      for (int i = 0;; ++i) {
        const auto op = group[member].submit({all_reduce()},
                                             (i + thread) % 3 == 0 ? blocking() : SubmitOptions());
        ++submitted;
        op->on_done([&] { ++finished; });
        if (i % 3 == thread) group[member].wait(op, microseconds(50));
        if (i % 5 == thread) group[member].wait(op);
        if (op->done() && !op->status().ok()) break;
      }
      ++failures;
    };
    std::vector<std::thread> threads;
    for (int member = 0; member < kMembers; ++member) {
      for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back(submitter, member, thread);
      }
    }
    std::this_thread::sleep_for(milliseconds(5));
    std::thread first([&] { group[0].abort(Status(Code::Aborted, "first")); });
    std::thread second([&] { group[0].abort(Status(Code::Aborted, "second")); });
    first.join();
    second.join();
    for (std::thread& thread : threads) thread.join();
    group.members.clear();  // joins the workers, whose last callbacks may still run
    EXPECT_EQ(finished, submitted);
    EXPECT_EQ(failures, kMembers * kThreads);
  }
}

TEST(CommunicatorThreads, SubmitsRaceWithRebuilds) {
  SimGroup group(1, kReal);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      while (!stop) {
        const auto op = group[0].submit({all_reduce()}, thread ? SubmitOptions() : blocking());
        const Status status = group[0].wait(op);
        EXPECT_TRUE(status.ok() || status.code == Code::Aborted) << status.str();
      }
    });
  }
  for (int epoch = 2; epoch < 100; ++epoch) {
    ASSERT_TRUE(group.rebuild(0, epoch, {0}).ok());
    std::this_thread::sleep_for(microseconds(100));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(group[0].submit({all_reduce()}, blocking())->status().ok());
}

// An engine whose rebuild waits until it is let go.
class SlowEngine : public FakeEngine {
 public:
  using FakeEngine::FakeEngine;
  Status rebuild(const Membership& membership, int rank, TimePoint deadline) override {
    entered.set_value();
    go_on.get_future().wait();
    return FakeEngine::rebuild(membership, rank, deadline);
  }
  std::promise<void> entered, go_on;
};

TEST(CommunicatorThreads, AnAbortDuringARebuildReturnsAndCounts) {
  SimWorld world(kReal);
  auto owned = std::make_unique<SlowEngine>(&world, 0);
  SlowEngine* engine = owned.get();
  Communicator communicator(std::move(owned), {});
  std::thread rebuilder([&] {
    const Membership alone{1, {engine->handle()}};
    EXPECT_EQ(communicator.rebuild(alone, 0, seconds(10)).message, "meanwhile");
  });
  engine->entered.get_future().wait();
  communicator.abort(Status(Code::Aborted, "meanwhile"));
  EXPECT_FALSE(communicator.submit({all_reduce()}, {})->status().ok());  // at once, too
  engine->go_on.set_value();
  rebuilder.join();
  EXPECT_EQ(communicator.failure().message, "meanwhile");
}

}  // namespace
}  // namespace gpumode
