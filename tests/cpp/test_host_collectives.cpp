#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "host/segment.h"
#include "host_group.h"

namespace gpumode {
namespace {

using Values = std::vector<float>;

// The same on every rank that asks for it. A generator of a few instructions, since these tests run
// under sanitizers, too.
Values random_values(size_t n, unsigned seed) {
  uint32_t state = seed * 2654435761u + 1;
  Values values(n);
  for (float& x : values) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int32_t>(state) >> 8) * 0x1p-23f;
  }
  return values;
}

Values poisoned(size_t n) { return Values(n, std::numeric_limits<float>::quiet_NaN()); }

// Sizes on both sides of every border: the direct payload, one slot, several rounds.
std::vector<size_t> interesting_counts() {
  const size_t direct = host::kDirectBytes / sizeof(float);
  const size_t slot = host::kSlotBytes / sizeof(float);
  return {0, 1, 3, direct, direct + 1, slot - 1, 11 * slot + 77};
}

class Collectives : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  HostGroup group{GetParam()};
};

void expect_ok(const std::shared_ptr<Op>& op) {
  EXPECT_TRUE(op->done());
  EXPECT_TRUE(op->status().ok()) << op->status().str();
}

TEST_P(Collectives, AllReduceSumsInRankOrderWithTheSameBitsEverywhere) {
  for (const size_t n : interesting_counts()) {
    std::vector<Values> results(size());
    group.run([&](int r, Communicator& c) {
      Values x = random_values(n, 17 + r);
      OpDesc op;
      op.collective = Collective::AllReduce;
      op.dtype = DType::F32;
      op.outputs = {buffer_of(x)};
      expect_ok(submit(c, op));
      results[r] = x;
    });
    Values expected = random_values(n, 17);
    for (int r = 1; r < size(); ++r) {
      const Values x = random_values(n, 17 + r);
      for (size_t i = 0; i < n; ++i) expected[i] += x[i];
    }
    for (int r = 0; r < size(); ++r) EXPECT_EQ(results[r], expected) << n << " on rank " << r;
  }
}

TEST_P(Collectives, ReduceChangesTheRootOnly) {
  for (const size_t n : interesting_counts()) {
    const int root = size() - 1;
    std::vector<Values> results(size());
    group.run([&](int r, Communicator& c) {
      Values x = random_values(n, 3 + r);
      OpDesc op;
      op.collective = Collective::Reduce;
      op.dtype = DType::F32;
      op.reduce_op = ReduceOp::Max;
      op.root = root;
      op.outputs = {buffer_of(x)};
      expect_ok(submit(c, op));
      results[r] = x;
    });
    Values expected = random_values(n, 3);
    for (int r = 1; r < size(); ++r) {
      const Values x = random_values(n, 3 + r);
      for (size_t i = 0; i < n; ++i) expected[i] = std::max(expected[i], x[i]);
    }
    for (int r = 0; r < root; ++r) EXPECT_EQ(results[r], random_values(n, 3 + r));
    EXPECT_EQ(results[root], expected);
  }
}

TEST_P(Collectives, BroadcastFromEachRoot) {
  for (const size_t n : interesting_counts()) {
    for (int root = 0; root < size(); root += 2) {
      group.run([&](int r, Communicator& c) {
        Values x = r == root ? random_values(n, 5) : poisoned(n);
        OpDesc op;
        op.collective = Collective::Broadcast;
        op.dtype = DType::F32;
        op.root = root;
        op.outputs = {buffer_of(x)};
        expect_ok(submit(c, op));
        EXPECT_EQ(x, random_values(n, 5));
      });
    }
  }
}

TEST_P(Collectives, AllGatherOfUnevenSizes) {
  for (const size_t n : interesting_counts()) {
    group.run([&](int r, Communicator& c) {
      Values x = random_values(n + 3 * r, 7 + r);
      std::vector<Values> outputs;
      OpDesc op;
      op.collective = Collective::AllGather;
      op.dtype = DType::F32;
      op.inputs = {buffer_of(x)};
      for (int q = 0; q < size(); ++q) outputs.push_back(poisoned(n + 3 * q));
      for (auto& out : outputs) op.outputs.push_back(buffer_of(out));
      expect_ok(submit(c, op));
      for (int q = 0; q < size(); ++q) EXPECT_EQ(outputs[q], random_values(n + 3 * q, 7 + q));
    });
  }
}

TEST_P(Collectives, GatherOfUnevenSizes) {
  for (const size_t n : interesting_counts()) {
    group.run([&](int r, Communicator& c) {
      Values x = random_values(n + r, 7 + r);
      std::vector<Values> outputs;
      OpDesc op;
      op.collective = Collective::Gather;
      op.dtype = DType::F32;
      op.inputs = {buffer_of(x)};
      for (int q = 0; q < size() && r == 0; ++q) outputs.push_back(poisoned(n + q));
      for (auto& out : outputs) op.outputs.push_back(buffer_of(out));
      expect_ok(submit(c, op));
      for (int q = 0; q < size() && r == 0; ++q) EXPECT_EQ(outputs[q], random_values(n + q, 7 + q));
    });
  }
}

TEST_P(Collectives, ScatterHandsEachRankItsOwn) {
  for (const size_t n : interesting_counts()) {
    const int root = size() / 2;
    group.run([&](int r, Communicator& c) {
      Values x = poisoned(n);
      std::vector<Values> inputs;
      OpDesc op;
      op.collective = Collective::Scatter;
      op.dtype = DType::F32;
      op.root = root;
      for (int q = 0; q < size() && r == root; ++q) inputs.push_back(random_values(n, 40 + q));
      for (auto& in : inputs) op.inputs.push_back(buffer_of(in));
      op.outputs = {buffer_of(x)};
      expect_ok(submit(c, op));
      EXPECT_EQ(x, random_values(n, 40 + r));
    });
  }
}

TEST_P(Collectives, AllToAllOfUnevenSizes) {
  const auto count = [](size_t n, int from, int to) { return n / 4 * (from + 1) + 11 * to; };
  for (const size_t n : interesting_counts()) {
    group.run([&](int r, Communicator& c) {
      std::vector<Values> inputs, outputs;
      OpDesc op;
      op.collective = Collective::AllToAll;
      op.dtype = DType::F32;
      for (int q = 0; q < size(); ++q) {
        inputs.push_back(random_values(count(n, r, q), 100 * r + q));
        outputs.push_back(poisoned(count(n, q, r)));
      }
      for (auto& in : inputs) op.inputs.push_back(buffer_of(in));
      for (auto& out : outputs) op.outputs.push_back(buffer_of(out));
      expect_ok(submit(c, op));
      for (int q = 0; q < size(); ++q) {
        EXPECT_EQ(outputs[q], random_values(count(n, q, r), 100 * q + r));
      }
    });
  }
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsSum) {
  for (const size_t n : interesting_counts()) {
    group.run([&](int r, Communicator& c) {
      std::vector<Values> inputs;
      Values x = poisoned(n);
      OpDesc op;
      op.collective = Collective::ReduceScatter;
      op.dtype = DType::F32;
      for (int q = 0; q < size(); ++q) inputs.push_back(random_values(n, 50 * r + q));
      for (auto& in : inputs) op.inputs.push_back(buffer_of(in));
      op.outputs = {buffer_of(x)};
      expect_ok(submit(c, op));
      Values expected = random_values(n, r);
      for (int q = 1; q < size(); ++q) {
        const Values more = random_values(n, 50 * q + r);
        for (size_t i = 0; i < n; ++i) expected[i] += more[i];
      }
      EXPECT_EQ(x, expected);
    });
  }
}

// Ops of all kinds and sizes, in flight together, with ranks that arrive at different times.
TEST_P(Collectives, ManyAsynchronousOpsInOneOrder) {
  constexpr int kOps = 60;
  group.run([&](int r, Communicator& c) {
    std::mt19937 same(99);  // what to do next: the same on all ranks
    std::mt19937 own(r);    // when
    std::vector<Values> buffers(kOps);
    std::vector<std::shared_ptr<Op>> ops;
    std::vector<size_t> counts;
    for (int i = 0; i < kOps; ++i) {
      const size_t n = same() % 3 == 0 ? same() % 200000 : same() % 100;
      counts.push_back(n);
      buffers[i] = random_values(n, 1000 * i + r);
      OpDesc op;
      op.dtype = DType::F32;
      op.collective = i % 3 == 0 ? Collective::Broadcast : Collective::AllReduce;
      op.root = i % size();
      op.outputs = {buffer_of(buffers[i])};
      if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
      ops.push_back(submit(c, op, i % 5 == 0));
    }
    for (int i = 0; i < kOps; ++i) {
      EXPECT_TRUE(c.wait(ops[i]).ok());
      Values expected = random_values(counts[i], 1000 * i + (i % 3 == 0 ? i % size() : 0));
      for (int q = 1; q < size() && i % 3 != 0; ++q) {
        const Values more = random_values(counts[i], 1000 * i + q);
        for (size_t k = 0; k < counts[i]; ++k) expected[k] += more[k];
      }
      EXPECT_EQ(buffers[i], expected) << "op " << i << " on rank " << r;
    }
  });
}

TEST_P(Collectives, CoalescedPartsCompleteTogether) {
  group.run([&](int r, Communicator& c) {
    std::vector<Values> buffers;
    std::vector<OpDesc> parts;
    for (int i = 0; i < 5; ++i) buffers.push_back(random_values(20000 * i + 1, 10 * i + r));
    for (auto& buffer : buffers) {
      OpDesc part;
      part.collective = Collective::AllReduce;
      part.dtype = DType::F32;
      part.reduce_op = ReduceOp::Avg;
      part.outputs = {buffer_of(buffer)};
      parts.push_back(part);
    }
    auto op = c.submit(std::move(parts), {});
    EXPECT_TRUE(c.wait(op).ok());
    EXPECT_EQ(c.sequence_number(), 1u);
    for (int i = 0; i < 5; ++i) {
      for (size_t k = 0; k < buffers[i].size(); ++k) {
        double sum = 0;
        for (int q = 0; q < size(); ++q) sum += random_values(k + 1, 10 * i + q)[k];
        ASSERT_NEAR(buffers[i][k], sum / size(), 1e-5);
        k += 9973;  // a few of them: the reference is quadratic
      }
    }
  });
}

// Each rank brings as many values as it likes, and learns how many the others have by the first
// part.
TEST_P(Collectives, APartIsPreparedWithWhatThePartsBeforeItHaveBrought) {
  group.run([&](int r, Communicator& c) {
    std::vector<uint64_t> counts(size()), count{uint64_t(r) * 40000 + 1};
    std::vector<Values> outputs;
    Values mine = random_values(count[0], r);
    OpDesc sizes;
    sizes.collective = Collective::AllReduceSparse;
    sizes.dtype = DType::F32;
    sizes.inputs = {buffer_of(count)};
    for (auto& each : counts) sizes.outputs.push_back({&each, sizeof(each)});
    OpDesc values;
    values.collective = Collective::AllGather;
    values.dtype = DType::F32;
    values.inputs = {buffer_of(mine)};
    values.prepare = [&](OpDesc* part) {
      for (const auto n : counts) outputs.push_back(poisoned(n));
      for (auto& each : outputs) part->outputs.push_back(buffer_of(each));
      return Status();
    };
    auto op = c.submit({sizes, values}, {});
    EXPECT_TRUE(c.wait(op).ok()) << op->status().str();
    for (int q = 0; q < size(); ++q) {
      EXPECT_EQ(outputs[q], random_values(size_t(q) * 40000 + 1, q));
    }
  });
}

TEST_P(Collectives, APartThatCannotBePreparedEndsTheOp) {
  group.run([&](int, Communicator& c) {
    OpDesc first, second;
    second.prepare = [](OpDesc*) { return Status(Code::Mismatch, "not these", {0, 1}); };
    auto op = c.submit({first, second}, {});
    EXPECT_EQ(c.wait(op).code, Code::Mismatch);
    EXPECT_EQ(op->status().ranks, (std::vector<int>{0, 1}));
  });
}

INSTANTIATE_TEST_SUITE_P(World, Collectives, testing::Values(1, 2, 3, 5),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(HostMismatch, IsAnErrorOnEveryRankNamingBothSides) {
  const auto difference = [](OpDesc* op, int kind) {
    if (kind == 0) op->dtype = DType::I32;
    if (kind == 1) op->reduce_op = ReduceOp::Max;
    if (kind == 2) op->outputs[0].nbytes -= 4;
    if (kind == 3) op->collective = Collective::Broadcast;
  };
  for (int kind = 0; kind < 4; ++kind) {
    for (const size_t n : {5, 500000}) {
      HostGroup group(4);
      group.run([&](int r, Communicator& c) {
        const Values before = random_values(n, r);
        Values x = before;
        OpDesc op;
        op.collective = Collective::AllReduce;
        op.dtype = DType::F32;
        op.outputs = {buffer_of(x)};
        if (r == 2) difference(&op, kind);
        const Status status = submit(c, op)->status();
        EXPECT_EQ(status.code, Code::Mismatch) << "rank " << r << ": " << status.str();
        EXPECT_NE(status.message.find("rank 2"), std::string::npos) << status.str();
        EXPECT_EQ(x, before) << "a mismatch must change nothing";
      });
    }
  }
}

TEST(HostMismatch, SizesOfAGatherMustFitPairwise) {
  HostGroup group(3);
  group.run([&](int r, Communicator& c) {
    Values x(r == 1 ? 9 : 8);
    std::vector<Values> outputs(3, Values(8));
    OpDesc op;
    op.collective = Collective::AllGather;
    op.dtype = DType::F32;
    op.inputs = {buffer_of(x)};
    for (auto& out : outputs) op.outputs.push_back(buffer_of(out));
    const Status status = submit(c, op)->status();
    EXPECT_EQ(status.code, Code::Mismatch) << "rank " << r << ": " << status.str();
    EXPECT_NE(status.message.find("36 bytes"), std::string::npos) << status.str();
  });
}

}  // namespace
}  // namespace gpumode
