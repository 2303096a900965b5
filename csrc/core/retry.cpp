#include "core/retry.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace gpumode {
namespace {

constexpr size_t kAlignment = 64;

// Whether an op that failed with it may succeed with the members that are left. An abort is
// somebody's wish; a mismatch, or what the system refuses, would come again.
bool may_retry(const Status& status) {
  return status.code == Code::PeerLost || status.code == Code::Timeout;
}

// Of one buffer per rank, those of the ranks that are kept.
void keep(std::vector<Buffer>* buffers, const std::vector<int>& kept, size_t num_ranks) {
  if (buffers->size() != num_ranks) return;
  std::vector<Buffer> left;
  left.reserve(kept.size());
  for (const int rank : kept) left.push_back((*buffers)[rank]);
  *buffers = std::move(left);
}

size_t padded(size_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::byte* Scratch::at_least(size_t nbytes) {
  if (nbytes + kAlignment > nbytes_) {
    memory_.reset();  // first, so that both are never there at once
    nbytes_ = 0;
    memory_.reset(new std::byte[nbytes + kAlignment]);
    nbytes_ = nbytes + kAlignment;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  return memory_.get() + (padded(address) - address);
}

Retry::Retry(Communicator* communicator, Registry* registry, Lineage* lineage, Scratch* scratch,
             std::vector<OpDesc> parts, Options options)
    : communicator_(communicator),
      registry_(registry),
      lineage_(lineage),
      scratch_(scratch),
      parts_(std::move(parts)),
      options_(std::move(options)),
      callers_(options_.callers != nullptr ? options_.callers : lineage->built) {}

void Retry::run() {
  for (;;) {
    const State state = step();
    if (state == State::Done) return;
    if (state == State::Working) continue;
    if (op_ != nullptr) {
      communicator_->wait(op_);
    } else {
      registry_->sleep_until(look_again());
    }
  }
}

Retry::State Retry::step() {
  if (succession_) return recover();
  return op_ == nullptr ? attempt() : attempted();
}

Retry::State Retry::done(Status status) {
  if (published_) return State::Done;
  status_ = std::move(status);
  contributors_ = nullptr;
  // The others may count on us in what they redo, and we shall not come.
  if (succession_) lineage_->given_up = status_;
  return State::Done;
}

Retry::State Retry::attempt() {
  if (!lineage_->given_up.ok()) return done(lineage_->given_up);
  if (const Status failure = communicator_->failure(); !failure.ok()) {
    if (!may_retry(failure)) return done(failure);
    open_ = communicator_->progress().next;
    begin_recovery();
    return State::Working;
  }
  std::vector<OpDesc> parts;
  if (Status lost = fit(&parts); !lost.ok()) return done(lost);
  try {
    stage(&parts);
  } catch (const std::bad_alloc&) {  // nobody may take our next op for this one
    communicator_->abort({Code::Internal, "there is no memory to keep the result of an op in"});
    return done(communicator_->failure());
  }
  contributors_ = lineage_->built;
  const Duration left = options_.deadline - registry_->now();
  // Half of the time left, so that there can be another try.
  op_ = options_.submit(std::move(parts), num_attempts_++, std::max(left / 2, Duration(1)));
  return State::Working;
}

Retry::State Retry::attempted() {
  if (!op_->done()) return State::Waiting;
  const Status status = op_->status();
  if (status.ok()) {
    publish();
    return done({});
  }
  if (!may_retry(status)) return done(status);
  open_ = op_->tag().seq != 0 ? op_->tag().seq : communicator_->progress().next;
  begin_recovery();
  return State::Working;
}

void Retry::begin_recovery() {
  Report report;
  report.committed = communicator_->progress().committed;
  report.open = open_;
  report.complete = op_ != nullptr && op_->complete();
  succession_.emplace(communicator_, registry_, lineage_, report,
                      Succession::Options{options_.deadline, options_.min_size, options_.on_joining,
                                          options_.on_joined});
  op_ = nullptr;
}

Retry::State Retry::recover() {
  if (options_.interrupted) {
    if (Status why = options_.interrupted(); !why.ok()) return done(std::move(why));
  }
  switch (step_succession()) {
    case Succession::State::Working:
      return State::Working;
    case Succession::State::Waiting:
      return State::Waiting;
    case Succession::State::Failed:
      return done(succession_->status());
    case Succession::State::Decided: {
      const Decision& decision = succession_->decision();
      // Our report was among those that it was made from: see Succession::adopt.
      if (decision.publish == open_ && open_ != 0) publish();
      open_ = 0;  // in the next membership numbers start anew
      succession_->set_open(!published_);
      if (decision.restarts < 0) return State::Working;
      return done({Code::Aborted, "the program of rank " + std::to_string(decision.restarts) +
                                      " starts over: this op can have no result any more, and the "
                                      "group must be rebuilt"});
    }
    case Succession::State::Joined:
      succession_.reset();
      return published_ ? done({}) : State::Working;
  }
  return State::Done;
}

Succession::State Retry::step_succession() {
  try {
    return succession_->step();
  } catch (...) {  // the registry did not answer
    lineage_->given_up = {Code::Aborted, "an earlier op was given up: the group must be rebuilt"};
    if (!published_) throw;
    return Succession::State::Failed;
  }
}

// The parts as those that are left see them: without the buffers of others, with the root's rank.
Status Retry::fit(std::vector<OpDesc>* parts) {
  *parts = parts_;
  for (OpDesc& part : *parts) part.commits = true;
  if (lineage_->built == callers_) return {};
  const std::vector<std::string>& callers = callers_->handles;
  std::vector<int> kept;  // ranks that the caller knows
  for (const std::string& handle : lineage_->built->handles) {
    const auto found = std::find(callers.begin(), callers.end(), handle);
    if (found == callers.end()) {
      return {Code::Aborted, "the group has new members, since another thread has reconfigured it"};
    }
    kept.push_back(static_cast<int>(found - callers.begin()));
  }
  for (OpDesc& part : *parts) {
    if (Status status = fit(&part, kept); !status.ok()) return status;
  }
  return {};
}

Status Retry::fit(OpDesc* part, const std::vector<int>& kept) {
  if (has_root(part->collective)) {
    const auto root = std::find(kept.begin(), kept.end(), part->root);
    if (root == kept.end()) {
      return {Code::PeerLost,
              "lost rank " + std::to_string(part->root) + ", the root of this " +
                  name(part->collective),
              {part->root}};
    }
    part->root = static_cast<int>(root - kept.begin());
  }
  keep(&part->inputs, kept, callers_->handles.size());
  keep(&part->outputs, kept, callers_->handles.size());
  return {};
}

// Has what the parts write go to scratch instead.
void Retry::stage(std::vector<OpDesc>* parts) {
  moves_.clear();
  const int rank = lineage_->rank;
  std::vector<Buffer*> staged;
  for (OpDesc& part : *parts) {
    const bool in_place =
        part.collective == Collective::AllReduce || part.collective == Collective::Reduce;
    if (part.collective == Collective::Reduce && part.root != rank) continue;  // only read
    if (part.collective == Collective::Broadcast && part.root == rank) continue;
    if (in_place && part.inputs.empty()) part.inputs = part.outputs;
    for (Buffer& output : part.outputs) staged.push_back(&output);
  }
  size_t nbytes = 0;
  for (const Buffer* buffer : staged) nbytes += padded(buffer->nbytes);
  std::byte* memory = scratch_->at_least(nbytes);
  for (Buffer* buffer : staged) {
    moves_.push_back({memory, *buffer});
    buffer->data = memory;
    memory += padded(buffer->nbytes);
  }
}

void Retry::publish() {
  for (const Move& move : moves_) {
    if (move.to.nbytes != 0) std::memcpy(move.to.data, move.from, move.to.nbytes);
  }
  published_ = true;
}

}  // namespace gpumode
