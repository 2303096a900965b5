#include "host/host_engine.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>

#include "host/collectives.h"
#include "host/endpoint.h"
#include "host/epoch.h"
#include "host/point_to_point.h"

namespace gpumode::host {
namespace {

// Long enough for a peer that runs on another core to answer, short enough that a rank that waits
// for longer costs nothing worth counting.
constexpr Duration kSpin = std::chrono::microseconds(50);
// Bounds segments and descriptors; one host has fewer ranks.
constexpr int kMaxSize = 1024;

class HostEngine : public Engine {
 public:
  HostEngine(Endpoint endpoint, const EngineOptions& options)
      : endpoint_(std::move(endpoint)), options_(options) {}

  Channel* channel() override { return epoch_.get(); }
  std::string handle() const override { return endpoint_.handle(); }
  bool reachable(const std::string& handle) const override { return Endpoint::reachable(handle); }
  int initial_rank(const std::string& handle) const override {
    return Endpoint::initial_rank(handle);
  }

  Status start(const Tag& tag, std::vector<OpDesc> parts, Lane lane) override;
  bool poll(std::vector<Completion>* finished) override;
  void wait(TimePoint until) override { epoch_->sleep(until, spin_); }
  void wake() override {
    if (epoch_) epoch_->wake();
  }
  std::vector<int> waiting_for(const Tag& tag) const override;
  void abort() override;
  Status rebuild(const Membership& membership, int rank, TimePoint deadline) override;

 private:
  struct Collectives {  // one op: its parts run one after the other
    Tag tag;
    Signature signature;
    std::vector<OpDesc> parts;
    size_t next_part = 0;
    Straggler straggler{};
  };
  struct Transfers {  // one op: its parts run beside each other
    size_t num_open = 0;
    int source = -1;
  };
  struct Started {
    Tag tag;
    std::vector<OpDesc> parts;
  };

  void take_started();
  Status start_part(Collectives* op);
  bool poll_collectives(std::vector<Completion>* finished);
  bool poll_transfers(std::vector<Completion>* finished);

  Endpoint endpoint_;
  const EngineOptions options_;
  Duration spin_{};
  std::unique_ptr<Epoch> epoch_;

  std::mutex started_mutex_;
  std::vector<Started> started_;
  std::atomic<bool> has_started_{false};

  // The driver's, from here on.
  std::vector<Started> taken_;
  std::deque<Collectives> collectives_;
  std::unique_ptr<Task> task_;  // of collectives_.front()
  std::unique_ptr<Rounds> rounds_;
  uint64_t num_steps_ = 0;
  std::unique_ptr<PointToPoint> p2p_;
  std::map<uint64_t, Transfers> transfers_;    // by Tag::seq
  std::map<uint64_t, uint64_t> transfer_ops_;  // Transfer::id -> Tag::seq
  uint64_t next_transfer_ = 0;
  std::vector<PointToPoint::Finished> finished_transfers_;
  uint32_t tag_epoch_ = 0;
};

Status HostEngine::start(const Tag& tag, std::vector<OpDesc> parts, Lane lane) {
  if (lane.stream != nullptr) {
    return {Code::InvalidArgument, "stream: this engine moves host memory; expected no stream"};
  }
  for (const OpDesc& part : parts) {
    if (is_p2p(part.collective) != tag.p2p()) {
      return {Code::InvalidArgument,
              "one coalesced op holds collectives or point-to-point "
              "transfers, not both"};
    }
  }
  {
    std::lock_guard<std::mutex> lock(started_mutex_);
    started_.push_back({tag, std::move(parts)});
    has_started_.store(true, std::memory_order_release);
  }
  epoch_->wake();
  return {};
}

bool HostEngine::poll(std::vector<Completion>* finished) {
  epoch_->look();
  take_started();
  bool moved = poll_collectives(finished);
  moved |= poll_transfers(finished);
  return moved;
}

void HostEngine::take_started() {
  if (!has_started_.load(std::memory_order_acquire)) return;
  {
    std::lock_guard<std::mutex> lock(started_mutex_);
    taken_.swap(started_);
    has_started_.store(false, std::memory_order_relaxed);
  }
  for (Started& op : taken_) {
    tag_epoch_ = op.tag.epoch;
    if (!op.tag.p2p()) {
      const Signature signature = Signature::of(op.parts);
      collectives_.push_back({op.tag, signature, std::move(op.parts)});
      continue;
    }
    Transfers& transfers = transfers_[op.tag.seq];
    for (const OpDesc& part : op.parts) {
      const bool is_send = part.collective == Collective::Send;
      ++transfers.num_open;
      transfer_ops_[next_transfer_] = op.tag.seq;
      p2p_->start({next_transfer_++, is_send, part.peer, part.tag, part.dtype,
                   is_send ? part.inputs[0] : part.outputs[0]});
    }
  }
  taken_.clear();
}

Status HostEngine::start_part(Collectives* op) {
  OpDesc& part = op->parts[op->next_part++];
  if (part.prepare) {
    if (Status status = part.prepare(&part); !status.ok()) return status;
  }
  task_ = make_collective({*epoch_, *rounds_, {++num_steps_, op->tag.seq}, op->signature}, part);
  return {};
}

bool HostEngine::poll_collectives(std::vector<Completion>* finished) {
  bool moved = false;
  while (!collectives_.empty()) {
    Collectives& op = collectives_.front();
    Status status;
    if (!task_ && op.next_part < op.parts.size()) status = start_part(&op);
    if (task_) {
      if (!task_->step()) return moved;
      moved = true;
      if (!task_->done()) return true;
      status = task_->status();
      if (task_->straggler().waited >= op.straggler.waited) op.straggler = task_->straggler();
      task_.reset();
      if (status.ok() && op.next_part < op.parts.size()) continue;
    }
    finished->push_back({op.tag, std::move(status), -1, op.straggler});
    collectives_.pop_front();
    moved = true;
  }
  return moved;
}

bool HostEngine::poll_transfers(std::vector<Completion>* finished) {
  if (transfers_.empty()) return false;
  const bool moved = p2p_->poll(&finished_transfers_);
  for (PointToPoint::Finished& transfer : finished_transfers_) {
    auto op = transfer_ops_.find(transfer.id);
    auto it = transfers_.find(op->second);
    transfer_ops_.erase(op);
    if (it == transfers_.end()) continue;  // another part of the op has failed
    Transfers& transfers = it->second;
    if (transfer.source >= 0) transfers.source = transfer.source;
    if (--transfers.num_open > 0 && transfer.status.ok()) continue;
    finished->push_back(
        {{tag_epoch_, 0, it->first}, std::move(transfer.status), transfers.source, {}});
    transfers_.erase(it);
  }
  finished_transfers_.clear();
  return moved;
}

std::vector<int> HostEngine::waiting_for(const Tag& tag) const {
  if (!tag.p2p()) {
    const bool queued = std::any_of(collectives_.begin(), collectives_.end(),
                                    [&](const Collectives& op) { return op.tag == tag; });
    return task_ && queued ? task_->waiting_for() : std::vector<int>();
  }
  std::vector<int> ranks;
  for (const auto& [transfer, seq] : transfer_ops_) {
    if (seq != tag.seq) continue;
    const std::vector<int> more = p2p_->waiting_for(transfer);
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void HostEngine::abort() {
  {
    std::lock_guard<std::mutex> lock(started_mutex_);
    started_.clear();
    has_started_.store(false, std::memory_order_relaxed);
  }
  task_.reset();
  collectives_.clear();
  transfers_.clear();
  transfer_ops_.clear();
  // Peers may still stream to what was posted here; nobody reads it any more.
  if (epoch_) p2p_ = std::make_unique<PointToPoint>(*epoch_);
}

Status HostEngine::rebuild(const Membership& membership, int rank, TimePoint deadline) {
  const int size = static_cast<int>(membership.handles.size());
  if (size < 1 || size > kMaxSize) {
    return {Code::InvalidArgument, "handles: " + std::to_string(size) + " members; expected 1 to " +
                                       std::to_string(kMaxSize)};
  }
  if (rank < 0 || rank >= size || membership.handles[rank] != handle()) {
    return {Code::InvalidArgument,
            "handles: the one at rank " + std::to_string(rank) + " is not this member's"};
  }
  abort();
  p2p_.reset();
  epoch_.reset();
  std::unique_ptr<Epoch> epoch;
  Status status = Epoch::join(endpoint_, membership, rank, deadline, &epoch);
  if (!status.ok()) return status;
  epoch_ = std::move(epoch);
  rounds_ = std::make_unique<Rounds>(size);
  p2p_ = std::make_unique<PointToPoint>(*epoch_);
  num_steps_ = 0;
  // In a crowd a rank that spins keeps a processor from looking for a member that has work.
  spin_ = options_.spin;
  if (spin_ < Duration::zero()) spin_ = epoch_->crowded() ? Duration::zero() : kSpin;
  return {};
}

}  // namespace

std::unique_ptr<Engine> make_engine(const EngineOptions& options, Status* status) {
  Endpoint endpoint;
  *status = Endpoint::open(options.initial_rank, &endpoint);
  if (!status->ok()) return nullptr;
  return std::make_unique<HostEngine>(std::move(endpoint), options);
}

}  // namespace gpumode::host
