#include "host/point_to_point.h"

#include <algorithm>
#include <cstring>

namespace gpumode::host {
namespace {

// Copied at once before the peer is told, so that both sides work at the same time.
constexpr size_t kStreamPiece = size_t{128} << 10;

}  // namespace

PointToPoint::PointToPoint(Epoch& epoch)
    : epoch_(epoch),
      to_(static_cast<size_t>(epoch.size())),
      from_(static_cast<size_t>(epoch.size())) {}

void PointToPoint::start(const Transfer& transfer) {
  ++num_open_;
  if (transfer.is_send && transfer.peer == epoch_.rank()) {
    own_.push_back(transfer);
  } else if (transfer.is_send) {
    to_[transfer.peer].unannounced.push_back(transfer);
  } else {
    posted_.push_back(transfer);
    ++num_unexamined_;
  }
}

bool PointToPoint::poll(std::vector<Finished>* finished) {
  bool moved = match_own(finished);
  moved |= match_posted(finished);
  for (int q = 0; q < epoch_.size(); ++q) {
    if (q == epoch_.rank()) continue;
    moved |= take_records(q, finished);
    moved |= push_grants(q);
    moved |= announce(q, finished);
    moved |= take_grants(q);
    moved |= stream_out(q, finished);
    moved |= stream_in(q, finished);
  }
  if (moved) epoch_.changed();
  return moved;
}

void PointToPoint::finish(uint64_t id, Status status, int source, std::vector<Finished>* finished) {
  --num_open_;
  finished->push_back({id, std::move(status), source});
}

// --- sending ---------------------------------------------------------------------------------

bool PointToPoint::announce(int peer, std::vector<Finished>* finished) {
  ToPeer& to = to_[peer];
  if (to.unannounced.empty()) return false;
  Outbox& outbox = epoch_.mine().outbox(peer);
  const Inbox& inbox = epoch_.of(peer).inbox(epoch_.rank());
  const uint64_t taken = inbox.records_tail.load(std::memory_order_acquire);
  const uint64_t matched = inbox.eager_matched.load(std::memory_order_acquire);
  bool moved = false;
  while (!to.unannounced.empty()) {
    const uint64_t head = outbox.records_head.load(std::memory_order_relaxed);
    if (head - taken == kRecords) break;
    const Transfer send = to.unannounced.front();
    to.unannounced.pop_front();
    Record& record = outbox.records[head % kRecords];
    record.id = to.next_number++;
    record.nbytes = send.buffer.nbytes;
    record.tag = send.tag;
    record.dtype = static_cast<uint8_t>(send.dtype);
    record.eager =
        send.buffer.nbytes <= kEagerBytes && to.eager_sent - matched < kMaxUnmatchedEager;
    if (record.eager != 0) {
      if (send.buffer.nbytes != 0) {
        std::memcpy(record.payload, send.buffer.data, send.buffer.nbytes);
      }
      ++to.eager_sent;
      finish(send.id, {}, -1, finished);
    } else {
      to.announced.emplace(record.id, send);
    }
    outbox.records_head.store(head + 1, std::memory_order_release);
    moved = true;
  }
  return moved;
}

bool PointToPoint::take_grants(int peer) {
  ToPeer& to = to_[peer];
  if (to.announced.empty()) return false;
  Outbox& outbox = epoch_.mine().outbox(peer);
  const Inbox& inbox = epoch_.of(peer).inbox(epoch_.rank());
  const uint64_t head = inbox.grants_head.load(std::memory_order_acquire);
  uint64_t tail = outbox.grants_tail.load(std::memory_order_relaxed);
  if (tail == head) return false;
  for (; tail != head; ++tail) {
    auto it = to.announced.find(inbox.grants[tail % kGrants]);
    if (it == to.announced.end()) continue;
    to.streaming.push_back({it->second});
    to.announced.erase(it);
  }
  outbox.grants_tail.store(tail, std::memory_order_release);
  return true;
}

bool PointToPoint::stream_out(int peer, std::vector<Finished>* finished) {
  ToPeer& to = to_[peer];
  if (to.streaming.empty()) return false;
  Outbox& outbox = epoch_.mine().outbox(peer);
  const uint64_t head = outbox.stream_head.load(std::memory_order_relaxed);
  const uint64_t tail =
      epoch_.of(peer).inbox(epoch_.rank()).stream_tail.load(std::memory_order_acquire);
  Stream& stream = to.streaming.front();
  const Buffer& buffer = stream.transfer.buffer;
  const size_t position = head % kStreamBytes;
  const size_t n = std::min({buffer.nbytes - stream.moved, kStreamBytes - (head - tail),
                             kStreamBytes - position, kStreamPiece});
  if (n == 0) return false;
  std::memcpy(outbox.stream + position, static_cast<std::byte*>(buffer.data) + stream.moved, n);
  outbox.stream_head.store(head + n, std::memory_order_release);
  stream.moved += n;
  if (stream.moved == buffer.nbytes) {
    // All bytes are in shared memory, where the receiver finds them even if we exit now.
    finish(stream.transfer.id, {}, -1, finished);
    to.streaming.pop_front();
  }
  return true;
}

// --- receiving -------------------------------------------------------------------------------

bool PointToPoint::take_records(int peer, std::vector<Finished>* finished) {
  const Outbox& outbox = epoch_.of(peer).outbox(epoch_.rank());
  Inbox& inbox = epoch_.mine().inbox(peer);
  const uint64_t head = outbox.records_head.load(std::memory_order_acquire);
  uint64_t tail = inbox.records_tail.load(std::memory_order_relaxed);
  if (tail == head) return false;
  for (; tail != head; ++tail) {
    const Record& record = outbox.records[tail % kRecords];
    Unmatched send{record.id,         record.nbytes,
                   record.tag,        static_cast<DType>(record.dtype),
                   record.eager != 0, {}};
    auto it = std::find_if(posted_.begin(), posted_.end(),
                           [&](const Transfer& receive) { return takes(receive, peer, send.tag); });
    if (it != posted_.end()) {
      const Transfer receive = *it;
      posted_.erase(it);
      accept(receive, peer, send, record.payload, finished);
    } else {
      if (send.eager) send.payload.assign(record.payload, record.payload + send.nbytes);
      from_[peer].unmatched.push_back(std::move(send));
    }
  }
  inbox.records_tail.store(tail, std::memory_order_release);
  return true;
}

// No bytes travel: a send to oneself is a copy, once both sides are there.
bool PointToPoint::match_own(std::vector<Finished>* finished) {
  bool moved = false;
  for (auto send = own_.begin(); send != own_.end();) {
    const auto receive = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer& t) {
      return takes(t, epoch_.rank(), send->tag);
    });
    if (receive == posted_.end()) {
      ++send;
      continue;
    }
    Status status = check(*receive, epoch_.rank(), send->tag, send->buffer.nbytes, send->dtype);
    if (status.ok() && send->buffer.nbytes != 0) {
      std::memmove(receive->buffer.data, send->buffer.data, send->buffer.nbytes);
    }
    finish(send->id, status, -1, finished);
    finish(receive->id, std::move(status), epoch_.rank(), finished);
    const auto place = static_cast<size_t>(std::distance(receive, posted_.end()));
    if (place <= num_unexamined_) --num_unexamined_;
    posted_.erase(receive);
    send = own_.erase(send);
    moved = true;
  }
  return moved;
}

// Receives that were posted after their sends had been announced.
bool PointToPoint::match_posted(std::vector<Finished>* finished) {
  bool moved = false;
  auto receive = std::prev(posted_.end(), static_cast<std::ptrdiff_t>(num_unexamined_));
  num_unexamined_ = 0;
  while (receive != posted_.end()) {
    bool matched = false;
    for (int q = 0; q < epoch_.size() && !matched; ++q) {
      if (receive->peer != q && receive->peer != kAnySource) continue;
      auto& unmatched = from_[q].unmatched;
      auto send = std::find_if(unmatched.begin(), unmatched.end(),
                               [&](const Unmatched& u) { return u.tag == receive->tag; });
      if (send == unmatched.end()) continue;
      accept(*receive, q, *send, send->payload.data(), finished);
      unmatched.erase(send);
      matched = true;
    }
    receive = matched ? posted_.erase(receive) : std::next(receive);
    moved |= matched;
  }
  return moved;
}

Status PointToPoint::check(const Transfer& receive, int peer, int tag, size_t nbytes,
                           DType dtype) const {
  if (nbytes == receive.buffer.nbytes && dtype == receive.dtype) return {};
  return {Code::Mismatch,
          "tag " + std::to_string(tag) + ": rank " + std::to_string(peer) + " sends " +
              std::to_string(nbytes / itemsize(dtype)) + " elements of " + name(dtype) +
              " to rank " + std::to_string(epoch_.rank()) + ", which receives " +
              std::to_string(receive.buffer.nbytes / itemsize(receive.dtype)) + " of " +
              name(receive.dtype),
          {peer, epoch_.rank()}};
}

void PointToPoint::accept(const Transfer& receive, int peer, const Unmatched& send,
                          const std::byte* payload, std::vector<Finished>* finished) {
  Inbox& inbox = epoch_.mine().inbox(peer);
  if (send.eager) {
    inbox.eager_matched.store(inbox.eager_matched.load(std::memory_order_relaxed) + 1,
                              std::memory_order_release);
  }
  Status status = check(receive, peer, send.tag, send.nbytes, send.dtype);
  if (!status.ok()) {
    finish(receive.id, std::move(status), peer, finished);
    return;
  }
  if (send.eager) {
    if (send.nbytes != 0) std::memcpy(receive.buffer.data, payload, send.nbytes);
    finish(receive.id, {}, peer, finished);
    return;
  }
  from_[peer].ungranted.push_back(send.send_id);
  from_[peer].streaming.push_back({receive});
}

bool PointToPoint::push_grants(int peer) {
  FromPeer& from = from_[peer];
  if (from.ungranted.empty()) return false;
  Inbox& inbox = epoch_.mine().inbox(peer);
  const uint64_t tail =
      epoch_.of(peer).outbox(epoch_.rank()).grants_tail.load(std::memory_order_acquire);
  uint64_t head = inbox.grants_head.load(std::memory_order_relaxed);
  bool moved = false;
  for (; !from.ungranted.empty() && head - tail < kGrants; ++head) {
    inbox.grants[head % kGrants] = from.ungranted.front();
    from.ungranted.pop_front();
    moved = true;
  }
  inbox.grants_head.store(head, std::memory_order_release);
  return moved;
}

bool PointToPoint::stream_in(int peer, std::vector<Finished>* finished) {
  FromPeer& from = from_[peer];
  if (from.streaming.empty()) return false;
  const Outbox& outbox = epoch_.of(peer).outbox(epoch_.rank());
  Inbox& inbox = epoch_.mine().inbox(peer);
  const uint64_t tail = inbox.stream_tail.load(std::memory_order_relaxed);
  const uint64_t head = outbox.stream_head.load(std::memory_order_acquire);
  Stream& stream = from.streaming.front();
  const Buffer& buffer = stream.transfer.buffer;
  const size_t position = tail % kStreamBytes;
  const size_t n = std::min({buffer.nbytes - stream.moved, static_cast<size_t>(head - tail),
                             kStreamBytes - position, kStreamPiece});
  if (n == 0) return false;
  std::memcpy(static_cast<std::byte*>(buffer.data) + stream.moved, outbox.stream + position, n);
  inbox.stream_tail.store(tail + n, std::memory_order_release);
  stream.moved += n;
  if (stream.moved == buffer.nbytes) {
    finish(stream.transfer.id, {}, peer, finished);
    from.streaming.pop_front();
  }
  return true;
}

std::vector<int> PointToPoint::waiting_for(uint64_t id) const {
  const auto has_id = [id](const Transfer& t) { return t.id == id; };
  const auto streams_id = [id](const Stream& s) { return s.transfer.id == id; };
  std::vector<int> ranks;
  for (int q = 0; q < epoch_.size(); ++q) {
    const auto& to = to_[q];
    const auto& from = from_[q];
    const bool needed = std::any_of(to.unannounced.begin(), to.unannounced.end(), has_id) ||
                        std::any_of(to.announced.begin(), to.announced.end(),
                                    [&](const auto& item) { return has_id(item.second); }) ||
                        std::any_of(to.streaming.begin(), to.streaming.end(), streams_id) ||
                        std::any_of(from.streaming.begin(), from.streaming.end(), streams_id);
    if (needed) ranks.push_back(q);
  }
  if (std::any_of(own_.begin(), own_.end(), has_id)) ranks.push_back(epoch_.rank());
  for (const Transfer& receive : posted_) {
    if (receive.id != id) continue;
    if (receive.peer != kAnySource) {
      ranks.push_back(receive.peer);
      continue;
    }
    // Anybody may still send, until all are gone.
    std::vector<int> others;
    for (int q = 0; q < epoch_.size(); ++q) {
      if (q == epoch_.rank()) continue;
      if (epoch_.alive(q)) return ranks;
      others.push_back(q);
    }
    ranks.insert(ranks.end(), others.begin(), others.end());
  }
  return ranks;
}

}  // namespace gpumode::host
