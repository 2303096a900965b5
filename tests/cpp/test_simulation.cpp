// Thousands of seeded schedules in virtual time: members submit collectives while some are killed,
// frozen, slowed, aborted, or call something else. Replay a failing seed with SIM_SEED=<seed>.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "sim_group.h"

namespace gpumode {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kSeeds = 200;  // one thread has no races
#else
constexpr int kSeeds = 2500;
#endif
constexpr Duration kTimeout = seconds(1);
constexpr Duration kGrace = seconds(1);  // after a deadline, every op must have ended

// One member's program: `num_ops` all-reduces, at most two in flight, until the group fails.
class Program {
 public:
  Program(Communicator* communicator, int num_ops)
      : communicator_(communicator), num_ops_(num_ops) {}

  void mismatch_at(int index) { mismatch_at_ = index; }

  bool step() {
    bool moved = false;
    const auto in_flight =
        std::count_if(ops.begin(), ops.end(), [](const auto& op) { return !op->done(); });
    if (in_flight < 2 && static_cast<int>(ops.size()) < num_ops_ && !failed()) {
      const int numel = static_cast<int>(ops.size()) == mismatch_at_ ? 7 : 1024;
      SubmitOptions options;
      options.timeout = kTimeout;
      ops.push_back(communicator_->submit({all_reduce(numel)}, options));
      moved = true;
    }
    return communicator_->drive() || moved;
  }

  bool failed() const {
    return std::any_of(ops.begin(), ops.end(),
                       [](const auto& op) { return op->done() && !op->status().ok(); });
  }
  bool finished() const {
    const bool none_left = failed() || static_cast<int>(ops.size()) == num_ops_;
    return none_left &&
           std::all_of(ops.begin(), ops.end(), [](const auto& op) { return op->done(); });
  }
  bool succeeded() const { return finished() && !failed(); }

  std::vector<std::shared_ptr<Op>> ops;

 private:
  Communicator* communicator_;
  int num_ops_;
  int mismatch_at_ = -1;
};

// A group of simulated members and what happens to them, all drawn from one seed.
class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : random_(seed),
        group_(2 + draw(4), world_options(seed), communicator_options()),
        num_ops_(4 + draw(12)) {
    for (auto& member : group_.members) programs_.emplace_back(member.get(), num_ops_);
    for (int member = 0; member < size(); ++member) {
      group_.world.add_member(member, [this, member] { return programs_[member].step(); });
    }
  }

  void check() {
    const int num_faults = draw(4);
    for (int i = 0; i < num_faults; ++i) draw_fault();
    ASSERT_TRUE(run()) << "a live member's op never ended";
    thaw_everybody();
    ASSERT_TRUE(run()) << "a thawed member's op never ended";
    check_deadlines();
    check_agreement_of_results();
    check_gates();
    if (num_faults == 0) {
      for (const Program& program : programs_) EXPECT_TRUE(program.succeeded());
    }
    rebuild_with_survivors();
  }

 private:
  int size() const { return static_cast<int>(group_.members.size()); }
  int draw(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }
  Duration draw_time(milliseconds bound) {
    return microseconds(draw(static_cast<int>(microseconds(bound).count())));
  }

  SimWorld::Options world_options(uint64_t seed) {
    SimWorld::Options options;
    options.seed = seed;
    options.detection_delay = draw_time(milliseconds(20));
    options.max_op_delay = draw_time(milliseconds(5));
    if (draw(2)) options.max_word_delay = draw_time(milliseconds(5));
    return options;
  }
  static Communicator::Options communicator_options() {
    Communicator::Options options;
    options.worker = false;
    return options;
  }

  void draw_fault() {
    const int victim = draw(size());
    const auto seq = static_cast<uint64_t>(1 + draw(num_ops_));
    const TimePoint when = group_.world.now() + draw_time(milliseconds(40));
    SimWorld& world = group_.world;
    switch (draw(8)) {
      case 0:
        world.at(when, [&world, victim] { world.kill(victim); });
        return;
      case 1:
        world.at(when, [&world, victim] { world.freeze(victim); });
        frozen_.insert(victim);
        if (draw(2)) {
          const TimePoint later = when + draw_time(milliseconds(3000));
          world.at(later, [&world, victim] { world.thaw(victim); });
        }
        return;
      case 2:
        world.at(when, [this, victim] { group_[victim].abort(Status(Code::Aborted, "enough")); });
        return;
      case 3:
        programs_[victim].mismatch_at(static_cast<int>(seq) - 1);
        return;
      case 4:
        group_.engines[victim]->inject(seq, {Fault::Kind::Hang, {}, {}});
        return;
      case 5:
        group_.engines[victim]->inject(seq,
                                       {Fault::Kind::Delay, {}, draw_time(milliseconds(2000))});
        return;
      case 6:
        group_.engines[victim]->inject(seq, {Fault::Kind::Fail, Status(Code::Internal, "EIO"), {}});
        return;
      case 7:
        group_.engines[victim]->inject(seq,
                                       {Fault::Kind::Refuse, Status(Code::Internal, "ENOMEM"), {}});
        return;
    }
  }

  // A member that may be frozen is not waited for.
  bool run() {
    const auto done = [&] {
      for (int member = 0; member < size(); ++member) {
        if (frozen_.count(member) || !group_.world.alive(member)) continue;
        if (!programs_[member].finished()) return false;
      }
      return true;
    };
    return group_.world.run(done, seconds(60));
  }

  void thaw_everybody() {
    // Scheduled freezes must have happened before, and deaths be known after.
    const TimePoint later = group_.world.now() + milliseconds(4000);
    group_.world.run([&] { return group_.world.now() >= later; }, seconds(10));
    for (int member : frozen_) group_.world.thaw(member);
    thawed_.swap(frozen_);
  }

  void check_deadlines() {
    for (int member = 0; member < size(); ++member) {
      if (!group_.world.alive(member) || thawed_.count(member)) continue;
      for (const auto& op : programs_[member].ops) {
        EXPECT_LE(op->finished_at() - op->started_at(), kTimeout + kGrace)
            << "member " << member << ": " << op->status().str();
      }
    }
  }

  // An op that one member saw as a mismatch itself has not succeeded anywhere.
  void check_agreement_of_results() {
    std::set<uint64_t> mismatched, succeeded;
    for (const Program& program : programs_) {
      for (const auto& op : program.ops) {
        if (!op->done()) continue;  // of a dead member
        const Status& status = op->status();
        const std::string own = "op " + std::to_string(op->tag().seq) + " of the group";
        if (status.ok()) succeeded.insert(op->tag().seq);
        if (status.code == Code::Mismatch && status.message.rfind(own, 0) == 0) {
          mismatched.insert(op->tag().seq);
        }
      }
    }
    for (uint64_t seq : mismatched) EXPECT_EQ(succeeded.count(seq), 0u) << "op " << seq;
  }

  void check_gates() {
    for (int member = 0; member < size(); ++member) {
      if (!group_.world.alive(member) || !programs_[member].failed()) continue;
      const Status failure = group_[member].failure();
      EXPECT_FALSE(failure.ok());
      const auto op = group_[member].submit({all_reduce()}, {});
      ASSERT_TRUE(op->done());
      EXPECT_EQ(op->status().str(), failure.str());
    }
  }

  void rebuild_with_survivors() {
    std::vector<int> survivors;
    for (int member = 0; member < size(); ++member) {
      if (group_.world.alive(member)) survivors.push_back(member);
    }
    if (survivors.empty()) return;
    rebuild(2, survivors);
    if (survivors.size() > 1 && draw(3) == 0) {  // one more dies on the way
      const int victim = survivors[draw(static_cast<int>(survivors.size()))];
      group_.world.kill(victim);
      ASSERT_TRUE(run());
      survivors.erase(std::find(survivors.begin(), survivors.end(), victim));
      for (int member : survivors) EXPECT_EQ(group_[member].failure().code, Code::PeerLost);
      rebuild(3, survivors);
    }
    ASSERT_TRUE(run());
    for (int member : survivors) {
      EXPECT_TRUE(programs_[member].succeeded()) << group_[member].failure().str();
    }
  }

  void rebuild(int64_t uuid, std::vector<int> survivors) {
    const std::vector<int> in_rank_order = survivors;
    std::shuffle(survivors.begin(), survivors.end(), random_);
    for (int member : survivors) {
      const Status status = group_.rebuild(member, uuid, in_rank_order);
      ASSERT_TRUE(status.ok()) << status.str();
      programs_[member] = Program(&group_[member], 3);
    }
  }

  std::mt19937_64 random_;
  SimGroup group_;
  int num_ops_;
  std::vector<Program> programs_;
  std::set<int> frozen_, thawed_;
};

TEST(Simulation, EverySeedKeepsThePromises) {
  const char* replay = std::getenv("SIM_SEED");
  const uint64_t first = replay != nullptr ? std::strtoull(replay, nullptr, 10) : 1;
  const uint64_t last = replay != nullptr ? first : kSeeds;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("replay with SIM_SEED=" + std::to_string(seed));
    Schedule(seed).check();
    if (HasFailure()) return;
  }
}

TEST(Simulation, ASeedIsASchedule) {
  const auto trace = [](uint64_t seed) {
    SimWorld::Options world_options;
    world_options.seed = seed;
    world_options.max_op_delay = milliseconds(1);
    Communicator::Options options;
    options.worker = false;
    SimGroup group(3, world_options, options);
    std::vector<Program> programs;
    for (auto& member : group.members) programs.emplace_back(member.get(), 5);
    for (int member = 0; member < 3; ++member) {
      group.world.add_member(member, [&, member] { return programs[member].step(); });
    }
    const auto done = [&] {
      return std::all_of(programs.begin(), programs.end(),
                         [](const Program& program) { return program.succeeded(); });
    };
    EXPECT_TRUE(group.world.run(done, seconds(1)));
    std::vector<TimePoint> times;
    for (const Program& program : programs) {
      for (const auto& op : program.ops) times.push_back(op->finished_at());
    }
    return times;
  };
  EXPECT_EQ(trace(7), trace(7));
  EXPECT_NE(trace(7), trace(8));
}

}  // namespace
}  // namespace gpumode
