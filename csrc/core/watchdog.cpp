#include "core/watchdog.h"

#include <limits>
#include <sstream>

namespace gpumode {
namespace {

std::string describe(const WatchedOp& op) {
  const std::string number = std::to_string(op.tag.seq & ~Tag::kPointToPoint);
  return (op.tag.p2p() ? "point-to-point op " : "op ") + number + ", " + name(op.collective) + ",";
}

std::vector<int> waiting_for(const Engine& engine, const Channel& channel, const WatchedOp& op) {
  return op.complete ? not_done(channel, op.tag.seq) : engine.waiting_for(op.tag);
}

Status timed_out(const Engine& engine, const Channel& channel, const WatchedOp& op) {
  std::ostringstream text;
  text << describe(op) << " timed out: its timeout of "
       << std::chrono::duration<double>(op.timeout).count() << " s passed";
  const std::vector<int> ranks = waiting_for(engine, channel, op);
  if (!ranks.empty()) text << " while it waited for " << name_ranks(ranks);
  return Status(Code::Timeout, text.str(), ranks);
}

}  // namespace

std::vector<int> not_done(const Channel& channel, uint64_t seq) {
  std::vector<int> ranks;
  for (int r = 0; r < channel.size(); ++r) {
    if (!channel.done(r, seq)) ranks.push_back(r);
  }
  return ranks;
}

Status given_up(const Channel& channel, uint64_t seq) {
  for (int r = 0; r < channel.size(); ++r) {
    Status why;
    uint64_t first_unfinished = 0;
    if (r != channel.rank() && channel.failed(r, &why, &first_unfinished) &&
        first_unfinished <= seq) {
      return why;
    }
  }
  return Status();
}

Verdict Watchdog::check(const Engine& engine, const Channel& channel,
                        const std::vector<WatchedOp>& ops) {
  if (ops.empty()) return Verdict();
  // First what a member said, which is the cause of what else may be seen here: a member that
  // gave up may have exited, or let this op run into its deadline.
  Verdict verdict;
  verdict.status = given_up(channel, std::numeric_limits<uint64_t>::max());
  verdict.learned = !verdict.status.ok();
  if (verdict.learned) {
    if (heard_) return verdict;
    heard_ = true;
    verdict = Verdict();
    verdict.again = true;
    return verdict;
  }

  verdict = check_deaths(engine, channel, ops);
  if (!verdict.status.ok() || verdict.again) return verdict;

  const TimePoint now = channel.now();
  for (const WatchedOp& op : ops) {
    if (now < op.deadline) continue;
    verdict.status = timed_out(engine, channel, op);
    break;
  }
  return verdict;
}

Verdict Watchdog::check_deaths(const Engine& engine, const Channel& channel,
                               const std::vector<WatchedOp>& ops) {
  Verdict verdict;
  bool any_known = false;
  for (int r = 0; r < channel.size(); ++r) {
    if (known_dead_[r]) {
      any_known = true;
    } else if (r != channel.rank() && !channel.alive(r)) {
      known_dead_[r] = true;
      verdict.again = true;
    }
  }
  if (!any_known || verdict.again) return verdict;

  for (const WatchedOp& op : ops) {
    const std::vector<int> missing = waiting_for(engine, channel, op);
    std::vector<int> lost;
    for (int r : missing) {
      if (known_dead_[r]) lost.push_back(r);
    }
    if (lost.empty() || (op.patient && lost.size() < missing.size())) continue;
    verdict.status =
        Status(Code::PeerLost,
               "lost " + name_ranks(lost) + ", which " + describe(op) + " waits for", lost);
    break;
  }
  return verdict;
}

}  // namespace gpumode
