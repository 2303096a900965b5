#include "core/fake_engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace gpumode {

void FakeEngine::inject(uint64_t seq, Fault fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_[seq] = std::move(fault);
}

void FakeEngine::inject_into_rebuild(Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  rebuild_fault_ = std::move(status);
}

const Fault* FakeEngine::fault(const Tag& tag) const {
  const auto found = faults_.find(tag.seq);
  return found == faults_.end() ? nullptr : &found->second;
}

std::string FakeEngine::handle() const {
  char text[24];  // zeros in front, so that handles sort as numbers
  std::snprintf(text, sizeof(text), "%010d", member_);
  return text;
}

int FakeEngine::initial_rank(const std::string& handle) const {
  return static_cast<int>(std::strtol(handle.c_str(), nullptr, 10));
}

bool FakeEngine::reachable(const std::string& handle) const {
  return world_->seen_alive(initial_rank(handle));
}

Status FakeEngine::start(const Tag& tag, std::vector<OpDesc> parts, Lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Fault* scripted = fault(tag);
  if (scripted != nullptr && scripted->kind == Fault::Kind::Refuse) return scripted->status;
  Started op;
  op.tag = tag;
  op.signature = Signature::of(parts);
  op.parts = std::move(parts);
  if (tag.p2p()) {
    transfers_.push_back(std::move(op));
  } else {
    collectives_.push_back(std::move(op));
  }
  return Status();
}

bool FakeEngine::poll(std::vector<Completion>* finished) {
  std::lock_guard<std::mutex> lock(mutex_);
  seen_ = world_->version();
  next_event_ = TimePoint::max();
  bool moved = false;
  for (Started& op : transfers_) {
    moved |= transfer(&op);
    if (op.parts.empty()) finished->push_back({op.tag, Status(), op.source_rank});
  }
  transfers_.erase(std::remove_if(transfers_.begin(), transfers_.end(),
                                  [](const Started& op) { return op.parts.empty(); }),
                   transfers_.end());
  while (!collectives_.empty() && advance_collective(finished)) moved = true;
  return moved;
}

// Moves the first collective on; returns whether anything changed.
bool FakeEngine::advance_collective(std::vector<Completion>* finished) {
  Started& op = collectives_.front();
  if (!op.entered) return enter(&op, finished);

  const Agreement agreement = check_agreement(*channel_, op.tag.seq, op.signature);
  op.missing = agreement.missing;
  if (!agreement.status.ok()) {
    finished->push_back({op.tag, agreement.status});
    collectives_.pop_front();
    return true;
  }
  if (!agreement.complete) return false;
  const TimePoint now = world_->now();
  if (op.finish_at == TimePoint::max()) op.finish_at = now + world_->draw_op_delay();
  if (now < op.finish_at) {
    alarm(op.finish_at);
    return false;
  }
  sum_values(op);
  finished->push_back({op.tag, Status()});
  collectives_.pop_front();
  return true;
}

namespace {

bool sums_one_value(const OpDesc& part) {
  return part.collective == Collective::AllReduce && part.dtype == DType::U64 &&
         part.outputs[0].data != nullptr && part.outputs[0].nbytes == sizeof(uint64_t);
}

}  // namespace

void FakeEngine::bring_value(const Started& op) {
  const OpDesc& part = op.parts[0];
  if (!sums_one_value(part)) return;
  const Buffer& input = part.inputs.empty() ? part.outputs[0] : part.inputs[0];
  channel_->bring(op.tag.seq, *static_cast<const uint64_t*>(input.data));
}

void FakeEngine::sum_values(const Started& op) {
  const OpDesc& part = op.parts[0];
  if (!sums_one_value(part)) return;
  uint64_t sum = 0;
  for (int r = 0; r < channel_->size(); ++r) sum += channel_->brought(r, op.tag.seq);
  *static_cast<uint64_t*>(part.outputs[0].data) = sum;
}

bool FakeEngine::enter(Started* op, std::vector<Completion>* finished) {
  const Fault* scripted = fault(op->tag);
  if (scripted != nullptr && scripted->kind == Fault::Kind::Hang) return false;
  if (scripted != nullptr && scripted->kind == Fault::Kind::Fail) {
    finished->push_back({op->tag, scripted->status});
    collectives_.pop_front();
    return true;
  }
  if (scripted != nullptr && scripted->kind == Fault::Kind::Delay) {
    const TimePoint now = world_->now();
    if (op->enter_at == TimePoint{}) op->enter_at = now + scripted->delay;
    if (now < op->enter_at) {
      alarm(op->enter_at);
      return false;
    }
  }
  bring_value(*op);
  channel_->announce(op->tag.seq, op->signature);
  op->entered = true;
  return true;
}

// Does what can be done of a point-to-point op; returns whether anything changed.
bool FakeEngine::transfer(Started* op) {
  const auto try_part = [&](const OpDesc& part) {
    if (part.collective == Collective::Send) {
      channel_->send(part.peer, part.tag);
      return true;
    }
    const int source = channel_->receive(part.peer, part.tag);
    if (source >= 0) op->source_rank = source;
    return source >= 0;
  };
  const auto left = std::remove_if(op->parts.begin(), op->parts.end(), try_part);
  const bool moved = left != op->parts.end();
  op->parts.erase(left, op->parts.end());
  return moved;
}

void FakeEngine::alarm(TimePoint when) {
  next_event_ = std::min(next_event_, when);
  world_->stop_at(when);
}

void FakeEngine::wait(TimePoint until) {
  uint64_t seen;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    seen = seen_;
    until = std::min(until, next_event_);
  }
  world_->wait(seen, until);
}

void FakeEngine::wake() {
  world_->write([] {});
}

std::vector<int> FakeEngine::waiting_for(const Tag& tag) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Started& op : collectives_) {
    if (op.tag == tag) return op.missing;
  }
  std::vector<int> ranks;
  for (const Started& op : transfers_) {
    if (op.tag != tag) continue;
    for (const OpDesc& part : op.parts) {
      if (part.peer != kAnySource) ranks.push_back(part.peer);
    }
  }
  return ranks;
}

void FakeEngine::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  collectives_.clear();
  transfers_.clear();
}

Status FakeEngine::rebuild(const Membership& membership, int rank, TimePoint) {
  if (channel_) channel_->leave();
  channel_.reset();
  if (rank < 0 || rank >= static_cast<int>(membership.handles.size()) ||
      membership.handles[rank] != handle()) {
    return Status(Code::InvalidArgument, "rank: this member has another place in handles");
  }
  std::vector<int> members, dead;
  for (const std::string& handle : membership.handles) {
    members.push_back(initial_rank(handle));
    if (!reachable(handle)) dead.push_back(static_cast<int>(members.size()) - 1);
  }
  Status status;
  if (!dead.empty()) status = Status(Code::PeerLost, "lost " + name_ranks(dead), dead);
  auto channel = std::make_unique<SimChannel>(world_, world_->join(membership.uuid, members), rank);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!rebuild_fault_.ok()) status = std::exchange(rebuild_fault_, Status());
  if (!status.ok()) {
    channel->leave();
    return status;
  }
  channel_ = std::move(channel);
  faults_.clear();
  return Status();
}

}  // namespace gpumode
