#include "core/succession.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "core/uuid.h"

namespace gpumode {
namespace {

// How long a member waits for the decision before it looks again: at first, and at most. Most often
// the last one to come decides at once.
constexpr Duration kFirstPause = std::chrono::milliseconds(1);
constexpr Duration kLastPause = std::chrono::milliseconds(10);
// It looks for the decision only, and this many times less often for reports.
constexpr int kLooksPerFullLook = 5;
// The part of the time left for which members are waited for that may be frozen.
constexpr int kPatience = 3;
// How long it rests after it could not build a group: at first, doubled each time, and at most.
constexpr Duration kFirstRest = std::chrono::milliseconds(1);
constexpr Duration kLastRest = std::chrono::milliseconds(64);

std::string joined(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

}  // namespace

// --------------------------------------------------------------------------------- what is written

std::string Report::str() const {
  std::ostringstream text;
  text << "1 " << committed << ' ' << open << ' ' << complete << ' ' << restarts;
  return text.str();
}

std::optional<Report> Report::parse(const std::string& text) {
  std::istringstream in(text);
  int version = 0;
  Report report;
  in >> version >> report.committed >> report.open >> report.complete >> report.restarts;
  if (in.fail() || version != 1) return std::nullopt;
  return report;
}

std::string Decision::str() const {
  return "1 " + std::to_string(publish) + " " + std::to_string(restarts) + " " + joined(members);
}

std::optional<Decision> Decision::parse(const std::string& text) {
  std::istringstream in(text);
  int version = 0;
  Decision decision;
  in >> version >> decision.publish >> decision.restarts;
  int rank = 0;
  while (in >> rank) {
    decision.members.push_back(rank);
    if (in.peek() == ',') in.ignore();
  }
  std::vector<int>& members = decision.members;
  const bool in_order = std::adjacent_find(members.begin(), members.end(),
                                           std::greater_equal<int>()) == members.end();
  if (version != 1 || members.empty() || members[0] < 0 || !in_order || !in.eof()) {
    return std::nullopt;
  }
  return decision;
}

Decision decide(const std::map<int, Report>& reports) {
  Decision decision;
  uint64_t open = 0;
  for (const auto& [rank, report] : reports) {
    decision.members.push_back(rank);
    if (report.restarts && decision.restarts < 0) decision.restarts = rank;
    if (report.open != 0 && (open == 0 || report.open < open)) open = report.open;
  }
  const bool all_have_it = std::all_of(reports.begin(), reports.end(), [open](const auto& each) {
    const Report& report = each.second;
    return report.committed >= open || (report.open == open && report.complete);
  });
  if (open != 0 && all_have_it) decision.publish = open;
  return decision;
}

// -------------------------------------------------------------------------------------- succession

Succession::Succession(Communicator* communicator, Registry* registry, Lineage* lineage,
                       const Report& report, const Options& options)
    : communicator_(communicator),
      registry_(registry),
      lineage_(lineage),
      options_(options),
      report_(report) {
  if (lineage->current->uuid != lineage->built->uuid) {  // nobody had an op in that one
    report_.committed = 0;
    report_.complete = false;
    set_open(report.open != 0);
  }
}

Succession::State Succession::step() {
  switch (phase_) {
    case Phase::Begin:
      return begin();
    case Phase::Post:
      return post();
    case Phase::Look:
      return look();
    case Phase::Propose:
      return propose();
    case Phase::Build:
      return build();
  }
  return State::Failed;
}

std::string Succession::key(const std::string& name) const {
  return "gpumode/after/" + std::to_string(lineage_->current->uuid) + "/" + name;
}

Succession::State Succession::fail(Status status) {
  status_ = std::move(status);
  return State::Failed;
}

// What was decided may be left to do: by a call that ended before it could.
Succession::State Succession::begin() {
  phase_ = Phase::Post;
  if (lineage_->tried) return State::Working;
  if (lineage_->restarts && !report_.restarts) {
    return fail({Code::Aborted,
                 "the program of another rank starts over: this op can have no result any more, "
                 "and the group must be rebuilt"});
  }
  if (!somebody_could_not_build()) phase_ = Phase::Build;
  return State::Working;
}

bool Succession::somebody_could_not_build() {
  std::vector<std::string> keys(lineage_->current->handles.size());
  for (size_t r = 0; r < keys.size(); ++r) keys[r] = report_key(static_cast<int>(r));
  const auto values = registry_->get(keys);
  return std::any_of(values.begin(), values.end(), [](const auto& value) { return !!value; });
}

Succession::State Succession::post() {
  registry_->set(report_key(lineage_->rank), report_.str());
  reports_.clear();
  dead_.clear();
  if (not_built_.code == Code::PeerLost)
    dead_.insert(not_built_.ranks.begin(), not_built_.ranks.end());
  num_looks_ = num_full_looks_ = 0;
  pause_ = kFirstPause;
  const TimePoint now = registry_->now();
  impatient_ = now + (options_.deadline - now) / kPatience;
  phase_ = Phase::Look;
  return State::Working;
}

Succession::State Succession::look() {
  const auto decision = registry_->get({key("decision")})[0];
  if (decision) return adopt(*decision);
  if (num_looks_++ % kLooksPerFullLook == 0) {
    look_for_reports();
    look_for_deaths();
    if (num_full_looks_++ > 0) pause_ = std::min(2 * pause_, kLastPause);
  }
  const TimePoint now = registry_->now();
  if (now >= options_.deadline) return fail(too_late());
  if (num_late() == 0 || (now >= impatient_ && enough())) {
    phase_ = Phase::Propose;
    return State::Working;
  }
  look_again_ = std::min(now + pause_, options_.deadline);
  return State::Waiting;
}

void Succession::look_for_reports() {
  std::vector<int> ranks;
  std::vector<std::string> keys;
  for (int r = 0; r < static_cast<int>(lineage_->current->handles.size()); ++r) {
    if (reports_.count(r) != 0) continue;
    ranks.push_back(r);
    keys.push_back(report_key(r));
  }
  const auto values = registry_->get(keys);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (values[i]) reports_[ranks[i]] = *values[i];
  }
}

void Succession::look_for_deaths() {
  const size_t size = lineage_->current->handles.size();
  // In a membership that was never built, nobody watches the members. In one that was, a member may
  // be gone that could not build it, and lives. Knock at their doors, ever more rarely.
  std::vector<Presence> presence;
  if (lineage_->current->uuid == lineage_->built->uuid) presence = communicator_->presence();
  presence.resize(size, Presence::Left);  // after a join that failed there is none, either
  const bool knock = (num_full_looks_ & (num_full_looks_ - 1)) == 0;
  for (size_t i = 0; i < size; ++i) {
    const int r = static_cast<int>(i);
    if (reports_.count(r) != 0 || dead_.count(r) != 0 || presence[i] == Presence::Here) continue;
    if (presence[i] == Presence::Dead ||
        (knock && !communicator_->reachable(lineage_->current->handles[i]))) {
      dead_.insert(r);
    }
  }
}

// Of how many it is not known whether they are dead, frozen, or only late.
size_t Succession::num_late() const {
  size_t num_late = 0;
  for (int r = 0; r < static_cast<int>(lineage_->current->handles.size()); ++r) {
    if (reports_.count(r) == 0 && dead_.count(r) == 0) ++num_late;
  }
  return num_late;
}

// Whether those that have come may leave out the ones that are late. One that is early must not
// shut out all the others.
bool Succession::enough() const {
  if (!options_.min_size) return reports_.size() >= num_late();
  return reports_.size() >= static_cast<size_t>(*options_.min_size);
}

Status Succession::too_late() const {
  std::string here;
  for (const auto& [rank, report] : reports_) {
    here += (here.empty() ? "" : ",") + std::to_string(rank);
  }
  std::string text = "the time was up before the ranks that came, " + here + " of " +
                     std::to_string(lineage_->current->handles.size()) + ", could go on";
  if (!enough()) {
    text += options_.min_size ? ": min_size is " + std::to_string(*options_.min_size)
                              : ": more are late, and may be alive";
  }
  if (!not_built_.ok()) text += "; the last attempt: " + not_built_.message;
  return {Code::Timeout, text};
}

Succession::State Succession::propose() {
  std::map<int, Report> reports;
  for (const auto& [rank, text] : reports_) {
    const std::optional<Report> report = Report::parse(text);
    if (!report) return fail({Code::Internal, report_key(rank) + " holds no report: " + text});
    reports[rank] = *report;
  }
  return adopt(registry_->set_once(key("decision"), decide(reports).str()));
}

Succession::State Succession::adopt(const std::string& text) {
  const std::optional<Decision> decision = Decision::parse(text);
  const auto size = static_cast<int>(lineage_->current->handles.size());
  if (!decision || decision->members.back() >= size) {
    return fail({Code::Internal, key("decision") + " holds no decision: " + text});
  }
  const std::vector<int>& members = decision->members;
  const auto me = std::find(members.begin(), members.end(), lineage_->rank);
  if (me == members.end()) {
    return fail({Code::WorldTooSmall,
                 "ranks " + joined(members) + " of " + std::to_string(size) +
                     " went on without rank " + std::to_string(lineage_->rank) +
                     ", which they had waited for; what became of the op that it was in is not "
                     "known here"});
  }
  decision_ = *decision;
  Membership next;
  next.uuid = uuid_of({std::to_string(lineage_->current->uuid), joined(members)});
  for (const int r : members) next.handles.push_back(lineage_->current->handles[r]);
  lineage_->rank = static_cast<int>(me - members.begin());
  lineage_->current = std::make_shared<const Membership>(std::move(next));
  lineage_->tried = false;
  lineage_->restarts = decision_.restarts >= 0;
  // Made from a report of an op that was given up since then; the others may have waited in vain.
  phase_ = ends_a_redo() && somebody_could_not_build() ? Phase::Post : Phase::Build;
  return State::Decided;
}

Succession::State Succession::build() {
  const auto size = static_cast<int>(lineage_->current->handles.size());
  if (options_.min_size && size < *options_.min_size) {
    return fail({Code::WorldTooSmall, std::to_string(size) + " ranks are left, and min_size is " +
                                          std::to_string(*options_.min_size)});
  }
  const TimePoint now = registry_->now();
  if (now >= options_.deadline) return fail(too_late());
  lineage_->tried = true;
  if (options_.on_joining) options_.on_joining();
  // Half of the time left, so that there can be another try.
  not_built_ =
      communicator_->rebuild(*lineage_->current, lineage_->rank, (options_.deadline - now) / 2);
  if (not_built_.ok()) {
    lineage_->joined(lineage_->current, lineage_->rank);
    if (options_.on_joined) options_.on_joined();
    if (!ends_a_redo()) return State::Joined;
    communicator_->abort({Code::Aborted, "rank " + std::to_string(lineage_->rank) +
                                             " starts over: the group must be rebuilt"});
    report_.committed = 0;
    phase_ = Phase::Post;
    return State::Working;
  }
  // What the system refuses us does not make us fit to shut out the others.
  if (not_built_.code == Code::Internal) return fail(not_built_);
  const TimePoint later = registry_->now();
  if (later >= options_.deadline) return fail(too_late());
  report_.committed = 0;
  report_.complete = false;
  set_open(report_.open != 0);
  phase_ = Phase::Post;
  look_again_ = later + std::min(kLastRest, kFirstRest * (1 << std::min(num_failed_builds_++, 10)));
  return State::Waiting;
}

}  // namespace gpumode
