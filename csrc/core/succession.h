#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/communicator.h"
#include "core/registry.h"

namespace gpumode {

// What a member says of its ops in a membership that has failed, once it has stopped them.
struct Report {
  uint64_t committed = 0;  // the last op that commits and has succeeded here
  uint64_t open = 0;       // the op that it is in and that may be retried; 0: none
  bool complete = false;   // its part of that op is done: see Op::complete
  bool restarts =
      false;  // its program starts over: it will not come back to an op that others redo

  std::string str() const;
  static std::optional<Report> parse(const std::string& text);
};

// Who comes after a membership, and what becomes of the op that its members are in.
struct Decision {
  std::vector<int> members;  // ranks of the membership that has failed, in their order
  // All members have the result of this op, and take it; 0: none. Ops behind it, or all if there is
  // none, are redone, since a member is not done with them, and so nobody can ever succeed.
  uint64_t publish = 0;
  int restarts = -1;  // a member whose program starts over: nothing is redone

  std::string str() const;
  static std::optional<Decision> parse(const std::string& text);
};

// The rule, for the members that have reported: publish an op if and only if each of them is
// complete or has succeeded. See docs/commit-protocol.md.
Decision decide(const std::map<int, Report>& reports);

// The memberships of one group, as one of its members knows them; for as long as the group lives.
struct Lineage {
  std::shared_ptr<const Membership>
      built;  // what the communicator is on, and what the caller knows of the group
  std::shared_ptr<const Membership> current;  // the same, or one that was decided later
  int rank = -1;                              // in `current`
  bool tried = true;                          // to build `current`
  Status given_up;        // why a call was given up that others may redo with us
  bool restarts = false;  // whether Decision::restarts was set in the decision for `current`

  void joined(std::shared_ptr<const Membership> membership, int rank_in_it) {
    built = current = std::move(membership);
    rank = rank_in_it;
    tried = true;
    given_up = {};
  }
};

// One member's way from a failure to a membership that works: agree with the other members who is
// left, build that group, and agree again if it cannot be built. It uses the communicator, whose
// group has failed, and the registry, under keys that carry the membership that has failed:
//
//   gpumode/after/<uuid>/report/<rank>   what the member says of its ops
//   gpumode/after/<uuid>/decision        who goes on: the first proposal, whoever made it
//
// A member that sees the reports of all members that it does not know to be dead proposes those
// that are there. So does one that has waited for long, if they are enough.
//
// If a program starts over after the others have decided to redo an op with it, the member joins
// them all the same, ends that op, and agrees with them once more.
class Succession {
 public:
  struct Options {
    TimePoint deadline{};
    std::optional<int> min_size;  // of the world to go on with; unset: see enough()
    // The rest may be left out. Called before the group is built with another membership, and when
    // it was.
    std::function<void()> on_joining, on_joined;
  };
  enum class State {
    Working,  // step again
    Waiting,  // there is nothing to do before look_again()
    Decided,  // decision() is new; act on it, then step again
    Joined,   // the new membership is built
    Failed    // status() says why
  };

  Succession(Communicator* communicator, Registry* registry, Lineage* lineage, const Report& report,
             const Options& options);

  // Goes one step: asks the registry one thing, or tries once to build a group. Never waits for a
  // member but while it builds.
  State step();

  TimePoint look_again() const { return look_again_; }
  const Decision& decision() const { return decision_; }
  const Status& status() const { return status_; }
  // What this member will say if it has to agree again: whether it still has an op to redo.
  void set_open(bool open) { report_.open = open ? 1 : 0; }

 private:
  enum class Phase { Begin, Post, Look, Propose, Build };

  State begin();
  bool ends_a_redo() const { return report_.restarts && !lineage_->restarts; }
  bool somebody_could_not_build();
  State post();
  State look();
  State propose();
  State adopt(const std::string& text);
  State build();
  State fail(Status status);

  std::string key(const std::string& name) const;
  std::string report_key(int rank) const { return key("report/" + std::to_string(rank)); }
  void look_for_reports();
  void look_for_deaths();
  size_t num_late() const;
  bool enough() const;
  Status too_late() const;

  Communicator* const communicator_;
  Registry* const registry_;
  Lineage* const lineage_;
  const Options options_;
  Report report_;
  Phase phase_ = Phase::Begin;
  TimePoint look_again_{}, impatient_{};
  Duration pause_{};
  std::map<int, std::string> reports_;  // of those that have come
  std::set<int> dead_;
  int num_looks_ = 0, num_full_looks_ = 0;
  Decision decision_;
  Status status_;
  Status not_built_;  // why the last membership could not be built
  int num_failed_builds_ = 0;
};

}  // namespace gpumode
