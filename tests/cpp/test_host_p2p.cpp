#include <numeric>
#include <random>

#include "host/segment.h"
#include "host_group.h"

namespace gpumode {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes random_bytes(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  Bytes bytes(n);
  for (auto& b : bytes) b = static_cast<uint8_t>(generator());
  return bytes;
}

OpDesc send_to(int peer, int tag, Bytes& bytes) {
  OpDesc op;
  op.collective = Collective::Send;
  op.peer = peer;
  op.tag = tag;
  op.inputs = {buffer_of(bytes)};
  return op;
}

OpDesc receive_from(int peer, int tag, Bytes& bytes) {
  OpDesc op;
  op.collective = Collective::Recv;
  op.peer = peer;
  op.tag = tag;
  op.outputs = {buffer_of(bytes)};
  return op;
}

const size_t kSizes[] = {0,
                         1,
                         host::kEagerBytes,
                         host::kEagerBytes + 1,
                         host::kStreamBytes - 1,
                         3 * host::kStreamBytes + 17};

TEST(HostP2P, EverySizeArrives) {
  HostGroup group(2);
  for (const size_t n : kSizes) {
    group.run([&](int r, Communicator& c) {
      Bytes bytes = r == 0 ? random_bytes(n, 1) : Bytes(n, 0xee);
      const auto op = submit(c, r == 0 ? send_to(1, 4, bytes) : receive_from(0, 4, bytes));
      EXPECT_TRUE(op->status().ok()) << op->status().str();
      EXPECT_EQ(bytes, random_bytes(n, 1));
      EXPECT_EQ(op->source_rank(), r == 0 ? -1 : 0);
    });
  }
}

// Everybody sends to everybody before anybody receives, and receives in the opposite order.
TEST(HostP2P, TagsMatchInAnyOrderAndSendsDoNotBlockEachOther) {
  constexpr int kSize = 4, kTags = 40;
  HostGroup group(kSize);
  const auto bytes_of = [](int tag) { return kSizes[tag % std::size(kSizes)]; };
  const auto seed = [](int from, int to, int tag) { return 10000u * from + 100 * to + tag; };
  group.run([&](int r, Communicator& c) {
    std::vector<std::vector<Bytes>> out(kSize), in(kSize);
    std::vector<std::shared_ptr<Op>> ops;
    for (int q = 0; q < kSize; ++q) {
      if (q == r) continue;
      for (int t = 0; t < kTags; ++t) out[q].push_back(random_bytes(bytes_of(t), seed(r, q, t)));
      for (int t = 0; t < kTags; ++t) in[q].emplace_back(bytes_of(t), 0xee);
    }
    for (int q = 0; q < kSize; ++q) {
      for (int t = 0; t < kTags && q != r; ++t) {
        ops.push_back(submit(c, send_to(q, t, out[q][t]), false));
      }
    }
    for (int q = kSize - 1; q >= 0; --q) {
      for (int t = kTags - 1; t >= 0 && q != r; --t) {
        ops.push_back(submit(c, receive_from(q, t, in[q][t]), false));
      }
    }
    for (const auto& op : ops) EXPECT_TRUE(c.wait(op).ok());
    for (int q = 0; q < kSize; ++q) {
      for (int t = 0; t < kTags && q != r; ++t) {
        EXPECT_EQ(in[q][t], random_bytes(bytes_of(t), seed(q, r, t)));
      }
    }
  });
}

TEST(HostP2P, SameTagKeepsItsOrder) {
  constexpr int kMessages = 500;  // more than the records and the eager credit
  HostGroup group(2);
  group.run([&](int r, Communicator& c) {
    std::vector<Bytes> messages;
    std::vector<std::shared_ptr<Op>> ops;
    for (int i = 0; i < kMessages; ++i) {
      messages.push_back(r == 0 ? random_bytes(i % 7 * 1000, i) : Bytes(i % 7 * 1000));
    }
    for (auto& m : messages) {
      ops.push_back(submit(c, r == 0 ? send_to(1, 0, m) : receive_from(0, 0, m), false));
    }
    for (const auto& op : ops) EXPECT_TRUE(c.wait(op).ok());
    for (int i = 0; i < kMessages; ++i) EXPECT_EQ(messages[i], random_bytes(i % 7 * 1000, i));
  });
}

TEST(HostP2P, AnySourceReportsWhoSent) {
  constexpr int kSize = 4;
  HostGroup group(kSize);
  group.run([&](int r, Communicator& c) {
    if (r != 0) {
      Bytes bytes = random_bytes(20000, r);
      EXPECT_TRUE(submit(c, send_to(0, 9, bytes))->status().ok());
      return;
    }
    std::vector<bool> seen(kSize);
    for (int i = 1; i < kSize; ++i) {
      Bytes bytes(20000);
      const auto op = submit(c, receive_from(kAnySource, 9, bytes));
      ASSERT_TRUE(op->status().ok()) << op->status().str();
      EXPECT_EQ(bytes, random_bytes(20000, op->source_rank()));
      EXPECT_FALSE(seen[op->source_rank()]);
      seen[op->source_rank()] = true;
    }
  });
}

TEST(HostP2P, RunsBesideACollectiveThatCannotFinishYet) {
  HostGroup group(2);
  group.run([&](int r, Communicator& c) {
    Bytes ping(100000, static_cast<uint8_t>(r)), x(10);
    OpDesc barrier;
    barrier.collective = Collective::Barrier;
    if (r == 0) {
      const auto op = submit(c, barrier, false);
      EXPECT_TRUE(submit(c, receive_from(1, 0, ping))->status().ok());
      EXPECT_TRUE(c.wait(op).ok());
    } else {
      EXPECT_TRUE(submit(c, send_to(0, 0, ping))->status().ok());
      EXPECT_TRUE(submit(c, barrier)->status().ok());
    }
  });
}

TEST(HostP2P, SizesThatDifferAreAMismatchOnBothSides) {
  for (const size_t n : {size_t{10}, size_t{100000}}) {
    HostGroup group(2);
    group.run([&](int r, Communicator& c) {
      Bytes bytes(r == 0 ? n : n + 1);
      const auto op = submit(c, r == 0 ? send_to(1, 0, bytes) : receive_from(0, 0, bytes));
      // A small send is done when it is in shared memory; the group's failure comes after it.
      if (r == 1 || n > host::kEagerBytes) {
        EXPECT_EQ(op->status().code, Code::Mismatch);
      }
    });
  }
}

TEST(HostP2P, AReceiveFailsOnlyForThePeerThatItNeeds) {
  HostGroup group(4);
  group.kill(2);  // leaves silently, as a process that has finished its work
  std::vector<int> living = {0, 1};
  group.run(living, [&](int r, Communicator& c) {
    Bytes bytes = r == 0 ? random_bytes(70000, 1) : Bytes(70000);
    const auto op = submit(c, r == 0 ? send_to(1, 0, bytes) : receive_from(0, 0, bytes));
    EXPECT_TRUE(op->status().ok()) << op->status().str();
  });
  group.run({3}, [&](int, Communicator& c) {
    Bytes bytes(8);
    const auto op = submit(c, receive_from(2, 0, bytes));
    EXPECT_EQ(op->status().code, Code::PeerLost);
    EXPECT_EQ(op->status().ranks, std::vector<int>{2});
  });
}

}  // namespace
}  // namespace gpumode
