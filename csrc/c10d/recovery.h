#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/store_registry.h"
#include "core/retry.h"

namespace gpumode {

class Backend;

// What a group needs to go on after a failure. One call at a time has it.
struct RecoveryState {
  std::mutex mutex;  // guards `taken`
  std::condition_variable freed;
  bool taken = false;
  // Whose turn it is has the rest.
  Lineage lineage;
  Scratch scratch;
};

// The turn of one call, and what it takes part with in the agreement of the members.
class Turn {
 public:
  // Waits until other calls are done; throws CollectiveTimeout at `deadline`.
  Turn(std::shared_ptr<RecoveryState> state, c10::intrusive_ptr<::c10d::Store> store,
       TimePoint deadline);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  Lineage* lineage() const { return &state_->lineage; }
  Scratch* scratch() const { return &state_->scratch; }
  Registry* registry() { return &registry_; }

 private:
  const std::shared_ptr<RecoveryState> state_;
  StoreRegistry registry_;
};

// While it lives, collectives of this thread on the backend are retried: see Retry.
class RetryScope {
 public:
  RetryScope(Backend* backend, Duration timeout, std::optional<int> min_size);
  ~RetryScope();
  RetryScope(const RetryScope&) = delete;
  RetryScope& operator=(const RetryScope&) = delete;

  // The one of this thread; null if there is none for the backend.
  static RetryScope* current(const Backend* backend);

  const Duration timeout;
  const std::optional<int> min_size;
  // Whose ranks the arguments speak of.
  const std::shared_ptr<const Membership> callers;
  // Of the last collective that succeeded: see Retry. The ranks are those that the contributors had
  // when the group was made.
  std::vector<int> contributors;
  uint32_t num_attempts = 0;

 private:
  const Backend* const backend_;
  RetryScope* const outer_;
};

// A program that starts over rebuilds the group, step by step, so that the caller may do something
// in between, such as to look for signals.
class Rebuild {
 public:
  Rebuild(std::shared_ptr<Communicator> communicator, std::unique_ptr<Turn> turn,
          const Succession::Options& options);

  // Whether it is decided who is left.
  bool agreed() const { return !succession_.decision().members.empty(); }
  // How long the caller should sleep before the next step; nothing once the group is rebuilt.
  std::optional<Duration> step();
  // Ends it where it is.
  void close() { turn_ = nullptr; }

 private:
  const std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<Turn> turn_;  // null once it is over
  Succession succession_;
};

}  // namespace gpumode
