#include <gtest/gtest.h>

#include <mutex>

#include "host_group.h"
#include "sim_group.h"

// What a communicator tells those who watch it: the start of each op, its failures, its stragglers.
namespace gpumode {
namespace {

constexpr SimWorld::Options kReal{SimWorld::Time::Real};

struct Failures {
  std::mutex mutex;
  std::vector<Status> seen;

  Communicator::Options options() {
    Communicator::Options options;
    options.on_failure = [this](const Status& why) {
      std::lock_guard<std::mutex> lock(mutex);
      seen.push_back(why);
    };
    return options;
  }
};

TEST(Observers, HearOfEveryStartInOrderAndOfNoRefusedOne) {
  SimGroup group(2, kReal);
  std::vector<uint64_t> numbers;
  SubmitOptions options;
  options.on_start = [&](const std::shared_ptr<Op>& op) {
    EXPECT_FALSE(op->done());
    numbers.push_back(op->tag().seq);
  };
  group[0].submit({all_reduce()}, options);
  group[0].submit({all_reduce()}, options);
  group[0].abort({Code::Aborted, "enough"});
  group[0].submit({all_reduce()}, options);
  EXPECT_EQ(numbers, (std::vector<uint64_t>{1, 2}));
}

TEST(Observers, HearOfEachFailureOnceAndNotOfTheEnd) {
  Failures failures;
  {
    SimGroup group(2, kReal, failures.options());
    const auto op = group[0].submit({all_reduce()}, {});
    group[0].abort({Code::Aborted, "first"});
    group[0].abort({Code::Aborted, "second"});
    EXPECT_EQ(op->status().message, "first");
    ASSERT_EQ(failures.seen.size(), 1u);
    EXPECT_EQ(failures.seen[0].message, "first");
  }
  failures.seen.clear();
  {
    SimGroup group(2, kReal, failures.options());
    group[0].submit({all_reduce()}, {});  // in flight when the group goes
  }
  for (const Status& why : failures.seen) {  // the other member may have learned of it
    EXPECT_NE(why.message, "the group was destroyed");
  }
}

TEST(Observers, LearnWhoCameLastAndHowMuchLater) {
  HostGroup group(3);
  const auto barrier = [] {
    OpDesc op;
    op.collective = Collective::Barrier;
    return op;
  };
  for (const int late : {0, 2}) {
    std::atomic<int> num_there{0};
    const TimePoint began = Clock::now();
    group.run([&](int r, Communicator& c) {
      std::shared_ptr<Op> op;
      if (r == late) {
        while (num_there < 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        op = submit(c, barrier());
      } else {
        op = submit(c, barrier(), false);  // enters before it returns
        ++num_there;
        c.wait(op);
      }
      EXPECT_EQ(op->straggler().rank, late);
      EXPECT_GE(op->straggler().waited, std::chrono::milliseconds(5));
      EXPECT_LE(op->straggler().waited, op->finished_at() - began);
    });
  }
}

TEST(Observers, AnOpThatFailedHasNoStraggler) {
  HostGroup group(2);
  group.run([](int r, Communicator& c) {
    std::vector<float> x(static_cast<size_t>(3 + r));
    OpDesc op;
    op.collective = Collective::AllReduce;
    op.dtype = DType::F32;
    op.outputs = {buffer_of(x)};
    const auto ended = submit(c, op);
    EXPECT_EQ(ended->status().code, Code::Mismatch);
    EXPECT_EQ(ended->straggler().rank, -1);
  });
}

TEST(Observers, NobodyIsLateWhereNobodyWaits) {
  HostGroup group(1);
  OpDesc op;
  op.collective = Collective::Barrier;
  EXPECT_EQ(submit(group.rank(0), op)->straggler().rank, -1);
}

}  // namespace
}  // namespace gpumode
