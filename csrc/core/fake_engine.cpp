#include "core/fake_engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace gpumode {

void FakeEngine::inject(uint64_t seq, Fault fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  faults_[seq] = std::move(fault);
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
  finished->push_back({op.tag, Status()});
  collectives_.pop_front();
  return true;
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
  channel_.reset();
  if (rank < 0 || rank >= static_cast<int>(membership.handles.size()) ||
      membership.handles[rank] != handle()) {
    return Status(Code::InvalidArgument, "rank: this member has another place in handles");
  }
  std::vector<int> members, dead;
  for (const std::string& handle : membership.handles) {
    members.push_back(static_cast<int>(std::strtol(handle.c_str(), nullptr, 10)));
    if (!world_->seen_alive(members.back())) {
      dead.push_back(static_cast<int>(members.size()) - 1);
    }
  }
  if (!dead.empty()) return Status(Code::PeerLost, "lost " + name_ranks(dead), dead);
  channel_ = std::make_unique<SimChannel>(world_, world_->join(membership.uuid, members), rank);
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.clear();
  return Status();
}

}  // namespace gpumode
