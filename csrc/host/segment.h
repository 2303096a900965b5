#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/os/shared_memory.h"
#include "core/signature.h"
#include "core/status.h"

namespace gpumode::host {

// The shared memory of one member in one epoch. Only its owner ever writes it; the other members
// map it read-only. So a peer that thaws or runs on after the epoch has ended can damage nothing,
// and no word needs a lock or an atomic read-modify-write. What a reader has consumed is written in
// the reader's own segment, where the publisher looks for it.
//
// The only memory that peers write is the Bell, which holds no data.

constexpr size_t kCacheLine = 64;

// Payload that travels inside an op's entry, so that a small collective is one message.
constexpr size_t kDirectBytes = size_t{32} << 10;
// Larger ones are published in rounds through rings of slots. Sized so that what one rank has in
// flight stays in its cache: see benchmarks/results/collectives.md.
constexpr uint64_t kSlots = 4;
constexpr size_t kSlotBytes = size_t{64} << 10;

// Point-to-point, per ordered pair of members.
constexpr uint64_t kRecords = 32;           // announced sends that the receiver has not taken yet
constexpr size_t kEagerBytes = 4096;        // a send up to this size travels inside its record
constexpr size_t kStreamBytes = 512 << 10;  // ring for the bytes of larger ones
constexpr uint64_t kGrants = 64;

// Two rings of slots: contributions to a collective, and results of its reduction.
enum Ring : int { kContributions = 0, kResults = 1, kNumRings = 2 };

struct Failure {
  std::atomic<uint32_t> announced;
  uint32_t code;
  uint64_t first_unfinished;
  uint32_t num_ranks;
  int32_t ranks[64];
  char message[512];
};

struct Header {
  // Which processors the owner may run on, a bit each; set before anybody else maps the segment.
  uint64_t processors[16];
  // Counts every change of this segment that a peer may wait for.
  alignas(kCacheLine) std::atomic<uint64_t> events;
  // 1 while the owner sleeps, or is about to, and wants its bell rung.
  alignas(kCacheLine) std::atomic<uint32_t> sleeping;
  // Rounds published so far in this epoch, per ring.
  alignas(kCacheLine) std::atomic<uint64_t> published[kNumRings];
  // The last op that commits and that the owner is done with.
  alignas(kCacheLine) std::atomic<uint64_t> done;
  alignas(kCacheLine) Failure failure;
};

// What a member says when it enters a collective, or one part of a coalesced one: a step. Steps
// alternate between two entries: a member enters step n+2 only after it has finished n+1, which
// everybody had to enter, and so to finish n.
struct Entry {
  alignas(kCacheLine) std::atomic<uint64_t> step;  // 0: none yet
  Signature signature;
  uint32_t direct;             // whether the payload is in the entry
  uint32_t rounds[kNumRings];  // that this member will publish in this step
  int64_t entered_at;          // of Clock, which all processes of a host share
  // The one length of everything that this member sends and expects, or kUneven.
  uint64_t uniform_length;
};
static_assert(offsetof(Entry, uniform_length) == kCacheLine, "an even step reads one cache line");

constexpr uint64_t kUneven = ~uint64_t{0};

// How many rounds of one publisher this member has consumed.
struct Consumed {
  alignas(kCacheLine) std::atomic<uint64_t> rounds[kNumRings];
};

// One announced send.
struct Record {
  uint64_t id;
  uint64_t nbytes;
  int32_t tag;
  uint8_t dtype;
  uint8_t eager;  // whether the payload is here
  uint8_t reserved[2];
  alignas(kCacheLine) std::byte payload[kEagerBytes];
};

// Written by the sender: its sends to one destination.
struct Outbox {
  alignas(kCacheLine) std::atomic<uint64_t> records_head;
  std::atomic<uint64_t> stream_head;  // bytes
  std::atomic<uint64_t> grants_tail;
  Record records[kRecords];
  alignas(kCacheLine) std::byte stream[kStreamBytes];
};

// Written by the receiver: what it has taken from one source, and which sends may stream.
struct Inbox {
  alignas(kCacheLine) std::atomic<uint64_t> records_tail;
  std::atomic<uint64_t> stream_tail;  // bytes
  std::atomic<uint64_t> eager_matched;
  std::atomic<uint64_t> grants_head;
  uint64_t grants[kGrants];  // ids of sends, in the order in which they shall stream
};

// Written by peers to wake the owner; a futex.
struct Bell {
  std::atomic<uint32_t> rings;
};

class Segment {
 public:
  static Status create(int size, Segment* segment, os::Fd* fd);
  static Status map(const os::Fd& fd, int size, Segment* segment);

  Header& header() const { return at<Header>(0); }
  Entry& entry(uint64_t step) const { return at<Entry>(entries_ + (step & 1) * entry_stride_); }
  // Bytes that the owner has for each rank in that step, itself included, and expects from each.
  uint64_t* sent(uint64_t step) const {
    return &at<uint64_t>(entries_ + (step & 1) * entry_stride_ + sizeof(Entry));
  }
  uint64_t* expected(uint64_t step) const { return sent(step) + size_; }
  std::byte* payload(uint64_t step) const {
    return memory_.data() + entries_ + (step & 1) * entry_stride_ + payload_offset_;
  }
  Consumed& consumed(int publisher) const {
    return at<Consumed>(consumed_ + static_cast<size_t>(publisher) * sizeof(Consumed));
  }
  std::byte* slot(Ring ring, uint64_t round) const {
    return memory_.data() + slots_ + (ring * kSlots + round % kSlots) * kSlotBytes;
  }
  Outbox& outbox(int destination) const {
    return at<Outbox>(outboxes_ + static_cast<size_t>(destination) * sizeof(Outbox));
  }
  Inbox& inbox(int source) const {
    return at<Inbox>(inboxes_ + static_cast<size_t>(source) * sizeof(Inbox));
  }

 private:
  // Sets the offsets for a group of `size` members and returns the segment's size in bytes.
  size_t lay_out(int size);
  template <class T>
  T& at(size_t offset) const {
    return *reinterpret_cast<T*>(memory_.data() + offset);
  }

  os::SharedMemory memory_;
  int size_ = 0;
  size_t entries_ = 0, entry_stride_ = 0, payload_offset_ = 0;
  size_t consumed_ = 0, inboxes_ = 0, slots_ = 0, outboxes_ = 0;
};

}  // namespace gpumode::host
