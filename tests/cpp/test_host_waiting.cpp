#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "host/collectives.h"

// Whom a rank says that it waits for, with collectives stepped by hand, so that a member can freeze
// at any point of one.
namespace gpumode::host {
namespace {

constexpr int kSize = 3;
constexpr int kFrozen = 1;
constexpr int kPoints = 40;

struct Member {
  Endpoint endpoint;
  std::unique_ptr<Epoch> epoch;
  std::unique_ptr<Rounds> rounds = std::make_unique<Rounds>(kSize);
  std::unique_ptr<Task> task;
  std::vector<float> input, output;
};

class HostWaiting : public ::testing::Test {
 protected:
  void SetUp() override {
    Membership membership;
    membership.uuid = 1;
    for (int r = 0; r < kSize; ++r) {
      ASSERT_TRUE(Endpoint::open(r, &members_[r].endpoint).ok());
      membership.handles.push_back(members_[r].endpoint.handle());
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < kSize; ++r) {
      threads.emplace_back([&, r] {
        const Status status =
            Epoch::join(members_[r].endpoint, membership, r,
                        Clock::now() + std::chrono::seconds(20), &members_[r].epoch);
        EXPECT_TRUE(status.ok()) << status.str();
      });
    }
    for (auto& thread : threads) thread.join();
  }

  // Starts a collective with `lengths[r]` floats from rank r.
  void start(Collective collective, const std::vector<size_t>& lengths) {
    ++step_;
    size_t total = 0;
    for (const size_t length : lengths) total += length;
    for (int r = 0; r < kSize; ++r) {
      Member& member = members_[r];
      const size_t received = collective == Collective::AllGather ? total : lengths[r] / kSize;
      member.input.assign(lengths[r], 1.0f);
      member.output.assign(received, 0.0f);
      OpDesc op;
      op.collective = collective;
      op.dtype = DType::F32;
      if (collective == Collective::AllReduce) {
        op.outputs = {buffer(member.input, 0, lengths[r])};
      } else if (collective == Collective::AllGather) {
        op.inputs = {buffer(member.input, 0, lengths[r])};
        size_t begin = 0;
        for (const size_t length : lengths) {
          op.outputs.push_back(buffer(member.output, begin, length));
          begin += length;
        }
      } else {
        for (int q = 0; q < kSize; ++q) {
          op.inputs.push_back(buffer(member.input, q * received, received));
        }
        op.outputs = {buffer(member.output, 0, received)};
      }
      const Signature signature = Signature::of({op});
      member.task = make_collective({*member.epoch, *member.rounds, {step_, step_}, signature}, op);
    }
  }

  static Buffer buffer(std::vector<float>& values, size_t begin, size_t length) {
    return {values.data() + begin, length * sizeof(float)};
  }

  bool step(int rank) {
    Task& task = *members_[rank].task;
    return !task.done() && task.step();
  }

  // Steps everybody `times` times, then the others as far as they come without the frozen one.
  void freeze_after(int times) {
    for (int i = 0; i < times; ++i) {
      for (int r = 0; r < kSize; ++r) step(r);
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < kSize; ++r) moved |= r != kFrozen && step(r);
    }
  }

  void thaw() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < kSize; ++r) moved |= step(r);
    }
    for (const Member& member : members_) EXPECT_TRUE(member.task->done());
  }

  Member members_[kSize];
  uint64_t step_ = 0;
};

TEST_F(HostWaiting, OnlyTheFrozenMemberIsNamed) {
  struct Case {
    Collective collective;
    std::vector<size_t> lengths;
  };
  const size_t large = 1 << 18;
  const Case cases[] = {
      {Collective::AllReduce, {large, large, large}},
      {Collective::AllGather, {large, large, large}},
      // The frozen one has given all that it has, and holds the last one up, not the first.
      {Collective::AllGather, {10, 10, large}},
      {Collective::ReduceScatter,
       {large / kSize * kSize, large / kSize * kSize, large / kSize * kSize}},
  };
  for (const Case& c : cases) {
    int stuck = 0;
    for (int times = 0; times < kPoints; ++times) {
      start(c.collective, c.lengths);
      freeze_after(times);
      for (const int r : {0, 2}) {
        if (members_[r].task->done()) continue;
        ++stuck;
        EXPECT_EQ(members_[r].task->waiting_for(), std::vector<int>{kFrozen})
            << name(c.collective) << " of rank " << r << ", frozen after " << times << " steps";
      }
      thaw();
    }
    EXPECT_GT(stuck, 6) << name(c.collective);
  }
}

}  // namespace
}  // namespace gpumode::host
