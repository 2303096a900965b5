#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/succession.h"

namespace gpumode {

// Memory for results that are not certain yet. It grows to what the largest op needs, and stays:
// fresh memory costs more than the op.
class Scratch {
 public:
  std::byte* at_least(size_t nbytes);

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t nbytes_ = 0;
};

// One call of a collective that survives the loss of members: the op is tried, and tried again on
// those that are left, until all of them have its result. Only then are the caller's buffers
// written: a call that fails has changed nothing.
//
// Buffers and roots are those of the ranks at the time of the call, and stay theirs: who was lost
// gives nothing and gets nothing. See docs/commit-protocol.md.
class Retry {
 public:
  struct Options {
    TimePoint deadline{};
    std::optional<int> min_size;  // see Succession
    // Whose ranks the parts speak of; null: those of the lineage.
    std::shared_ptr<const Membership> callers;
    // Starts one attempt.
    std::function<std::shared_ptr<Op>(std::vector<OpDesc> parts, uint32_t attempt,
                                      Duration timeout)>
        submit;
    std::function<void()> on_joining, on_joined;  // see Succession
    // Not Ok once somebody here wants the call to end. May be left out.
    std::function<Status()> interrupted;
  };
  enum class State { Working, Waiting, Done };

  // `parts` are collectives without OpDesc::prepare.
  Retry(Communicator* communicator, Registry* registry, Lineage* lineage, Scratch* scratch,
        std::vector<OpDesc> parts, Options options);

  // Goes one step. Waiting: nothing is to be done before op() is done, or if that is null before
  // look_again().
  State step();
  // Steps until the end; waits in between.
  void run();

  // Valid when done.
  const Status& status() const { return status_; }
  // Of an op that succeeded: those whose inputs are in the result, and whom its average divides by.
  const std::shared_ptr<const Membership>& contributors() const { return contributors_; }
  uint32_t num_attempts() const { return num_attempts_; }

  const std::shared_ptr<Op>& op() const { return op_; }
  TimePoint look_again() const { return succession_->look_again(); }

 private:
  struct Move {
    const std::byte* from;
    Buffer to;
  };

  State attempt();
  State attempted();
  State recover();
  Succession::State step_succession();
  State done(Status status);
  void begin_recovery();
  Status fit(std::vector<OpDesc>* parts);
  Status fit(OpDesc* part, const std::vector<int>& kept);
  void stage(std::vector<OpDesc>* parts);
  void publish();

  Communicator* const communicator_;
  Registry* const registry_;
  Lineage* const lineage_;
  Scratch* const scratch_;
  const std::vector<OpDesc> parts_;
  const Options options_;
  const std::shared_ptr<const Membership> callers_;  // with the ranks that the caller knows

  std::shared_ptr<Op> op_;
  uint64_t open_ = 0;        // the number of op_, or of what it would be
  std::vector<Move> moves_;  // what publishing does
  bool published_ = false;
  std::shared_ptr<const Membership> contributors_;
  uint32_t num_attempts_ = 0;
  std::optional<Succession> succession_;
  Status status_;
};

}  // namespace gpumode
