#include "host/segment.h"

#include <new>

namespace gpumode::host {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

size_t Segment::lay_out(int size) {
  size_ = size;
  const auto n = static_cast<size_t>(size);
  payload_offset_ = round_up(sizeof(Entry) + 2 * n * sizeof(uint64_t), kCacheLine);
  entry_stride_ = round_up(payload_offset_ + kDirectBytes, kPage);
  entries_ = round_up(sizeof(Header), kPage);
  consumed_ = entries_ + 2 * entry_stride_;
  inboxes_ = round_up(consumed_ + n * sizeof(Consumed), kPage);
  slots_ = round_up(inboxes_ + n * sizeof(Inbox), kPage);
  outboxes_ = slots_ + kNumRings * kSlots * kSlotBytes;
  return outboxes_ + n * sizeof(Outbox);
}

Status Segment::create(int size, Segment* segment, os::Fd* fd) {
  Segment made;
  // All counters start at 0, which is what fresh memory holds; op numbers start at 1.
  Status status = os::SharedMemory::create(made.lay_out(size), &made.memory_, fd);
  if (status.ok()) *segment = std::move(made);
  return status;
}

Status Segment::map(const os::Fd& fd, int size, Segment* segment) {
  Segment mapped;
  Status status = os::SharedMemory::map(fd, mapped.lay_out(size), false, &mapped.memory_);
  if (status.ok()) *segment = std::move(mapped);
  return status;
}

}  // namespace gpumode::host
