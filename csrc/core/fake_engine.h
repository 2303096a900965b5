#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/engine.h"
#include "core/sim_channel.h"

namespace gpumode {

// What is to happen to one op on one member.
struct Fault {
  enum class Kind {
    Fail,   // the engine reports `status` for it
    Hang,   // the member never enters it
    Delay,  // the member enters it `delay` after it could
    Refuse  // start returns `status`
  };
  Kind kind = Kind::Fail;
  Status status;
  Duration delay{};
};

// A data plane that moves no data, but for sums of one uint64 each, so that a test can see whose
// inputs a result holds. A collective is done when every member has entered it with the
// same signature and the world's random delay has passed; a send at once; a receive when its
// message was sent. It runs in a SimWorld, in virtual time on one thread or in real time on many.
class FakeEngine : public Engine {
 public:
  FakeEngine(SimWorld* world, int member) : world_(world), member_(member) {}

  // Scripts what happens to op `seq` (Tag::seq) of the current epoch.
  void inject(uint64_t seq, Fault fault);
  // The next rebuild fails here with `status`.
  void inject_into_rebuild(Status status);

  Channel* channel() override { return channel_.get(); }
  std::string handle() const override;
  bool reachable(const std::string& handle) const override;
  int initial_rank(const std::string& handle) const override;
  Status start(const Tag& tag, std::vector<OpDesc> parts, Lane lane) override;
  bool poll(std::vector<Completion>* finished) override;
  void wait(TimePoint until) override;
  void wake() override;
  std::vector<int> waiting_for(const Tag& tag) const override;
  void abort() override;
  Status rebuild(const Membership& membership, int rank, TimePoint deadline) override;

 private:
  struct Started {
    Tag tag;
    std::vector<OpDesc> parts;  // of a point-to-point op: what is left to do
    Signature signature;
    TimePoint enter_at{}, finish_at = TimePoint::max();
    bool entered = false;
    int source_rank = -1;
    std::vector<int> missing;
  };

  const Fault* fault(const Tag& tag) const;
  bool advance_collective(std::vector<Completion>* finished);
  bool enter(Started* op, std::vector<Completion>* finished);
  void bring_value(const Started& op);
  void sum_values(const Started& op);
  bool transfer(Started* op);
  void alarm(TimePoint when);

  SimWorld* const world_;
  const int member_;
  std::unique_ptr<SimChannel> channel_;

  mutable std::mutex mutex_;  // guards the rest; taken before the world's
  std::map<uint64_t, Fault> faults_;
  Status rebuild_fault_;
  std::deque<Started> collectives_;  // only the first is under way
  std::vector<Started> transfers_;
  TimePoint next_event_ = TimePoint::max();  // when poll will find something new by itself
  uint64_t seen_ = 0;                        // the world's version before the last poll
};

}  // namespace gpumode
