// Thousands of seeded schedules in virtual time: members run a program of retryable all-reduces
// while some are killed, frozen, slowed, cut off from a group that is being built, or abort. No two
// members, dead and excluded ones included, may ever have different results for one op. Replay a
// failing seed with SIM_SEED=<seed>.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "core/retry.h"
#include "memory_registry.h"
#include "sim_group.h"

namespace gpumode {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kSeeds = 500;  // one thread has no races
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kSeeds = 2000;
#else
constexpr int kSeeds = 10000;
#endif
constexpr Duration kTimeout = seconds(2);
constexpr Duration kGrace = seconds(1);
constexpr uint64_t kHarmlessStall = 2000;  // us; members that stall for longer may be left out

// An op of the program: which run of it, and which op of that run.
using OpName = std::pair<int64_t, int>;

uint64_t input_of(int member, const OpName& name) {
  std::mt19937_64 random(static_cast<uint64_t>(name.first) * 31 +
                         static_cast<uint64_t>(name.second) * 1009 + static_cast<uint64_t>(member));
  random();
  return random();
}

OpDesc sum_of(uint64_t* value) {
  OpDesc part;
  part.collective = Collective::AllReduce;
  part.dtype = DType::U64;
  part.outputs = {Buffer{value, sizeof(*value)}};
  return part;
}

struct Result {
  uint64_t sum = 0;
  std::vector<std::string> contributors;  // empty: the call never returned
};

// One member: `num_ops` retryable ops, one after the other. A failure that ends a call makes it
// start over, together with all others, unless it is out of the group.
class Program {
 public:
  Program(SimGroup* group, Registry* registry, int member, int num_ops, std::optional<int> min_size)
      : group_(group),
        registry_(registry),
        member_(member),
        num_ops_(num_ops),
        min_size_(min_size) {
    auto everybody = std::make_shared<Membership>();
    everybody->uuid = run_;
    for (const FakeEngine* engine : group->engines) everybody->handles.push_back(engine->handle());
    lineage_.joined(std::move(everybody), member);
  }

  bool step() {
    if (over()) return false;
    if (registry_->now() < sleeps_until_) {
      group_->world.stop_at(sleeps_until_);
      return communicator().drive();
    }
    if (succession_) return start_over();
    if (!retry_ && starts_over_) begin_starting_over();
    if (succession_) return true;
    if (!retry_) begin_op();
    switch (retry_->step()) {
      case Retry::State::Working:
        return true;
      case Retry::State::Waiting:
        if (retry_->op() == nullptr) sleeps_until_ = retry_->look_again();
        return communicator().drive();
      case Retry::State::Done:
        end_op();
        return true;
    }
    return false;
  }

  // As a program that catches an exception of another op would, or another thread of it.
  void start_over_soon() { starts_over_ = true; }
  void start_over_now() {
    starts_over_ = interrupted_ = true;
    if (communicator().failure().ok()) communicator().abort(Status(Code::Aborted, "starts over"));
  }

  bool over() const { return succeeded() || !out_.ok(); }
  bool succeeded() const { return next_op_ == num_ops_; }
  const Status& out() const { return out_; }
  // What the member's buffers hold of each op whose result it took.
  std::map<OpName, Result> results() const {
    std::map<OpName, Result> all = results_;
    if (retry_ && value_ != input_of(member_, name())) all[name()] = {value_, {}};
    return all;
  }
  bool late() const { return late_; }  // a call took longer than it may
  const std::vector<std::string>& problems() const { return problems_; }
  int num_restarts() const { return num_restarts_; }

 private:
  OpName name() const { return {run_, next_op_}; }
  Communicator& communicator() { return *group_->members[member_]; }

  void begin_op() {
    value_ = input_of(member_, name());
    began_ = registry_->now();
    Retry::Options options;
    options.deadline = began_ + kTimeout;
    options.min_size = min_size_;
    options.interrupted = [this] {
      return interrupted_ ? Status(Code::Aborted, "interrupted") : Status();
    };
    options.submit = [this](std::vector<OpDesc> parts, uint32_t attempt, Duration timeout) {
      SubmitOptions submit;
      submit.timeout = timeout;
      submit.attempt = attempt;
      return communicator().submit(std::move(parts), std::move(submit));
    };
    retry_.emplace(&communicator(), registry_, &lineage_, &scratch_,
                   std::vector<OpDesc>{sum_of(&value_)}, std::move(options));
  }

  void end_op() {
    late_ |= registry_->now() > began_ + kTimeout + kGrace;
    const Status status = retry_->status();
    if (status.ok()) {
      results_[name()] = {value_, retry_->contributors()->handles};
      ++next_op_;
    } else if (value_ != input_of(member_, name())) {
      problems_.push_back("a failed op changed its input");
    }
    retry_.reset();
    if (status.ok()) return;
    if (status.code == Code::WorldTooSmall) {
      out_ = status;
      return;
    }
    begin_starting_over();
  }

  void begin_starting_over() {
    ++num_restarts_;
    starts_over_ = interrupted_ = false;
    communicator().abort(Status(Code::Aborted, "starts over"));
    Report report;
    report.committed = communicator().progress().committed;
    report.restarts = true;
    Succession::Options options;
    options.deadline = registry_->now() + kTimeout;
    options.min_size = min_size_;
    succession_.emplace(&communicator(), registry_, &lineage_, report, options);
  }

  bool start_over() {
    switch (succession_->step()) {
      case Succession::State::Waiting:
        sleeps_until_ = succession_->look_again();
        return false;
      case Succession::State::Joined:
        run_ = lineage_.built->uuid;
        next_op_ = 0;
        succession_.reset();
        return true;
      case Succession::State::Failed:
        out_ = succession_->status();
        return true;
      default:
        return true;
    }
  }

  SimGroup* const group_;
  Registry* const registry_;
  const int member_, num_ops_;
  const std::optional<int> min_size_;
  Lineage lineage_;
  Scratch scratch_;
  int64_t run_ = 1;
  int next_op_ = 0;
  uint64_t value_ = 0;
  TimePoint began_{}, sleeps_until_{};
  std::optional<Retry> retry_;
  std::optional<Succession> succession_;
  std::map<OpName, Result> results_;
  std::vector<std::string> problems_;
  int num_restarts_ = 0;
  bool late_ = false, starts_over_ = false, interrupted_ = false;
  Status out_;
};

struct Tally {
  int published_by_decision = 0, excluded = 0, restarts = 0, shrunk = 0, failed_builds = 0;
};

class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : random_(seed),
        group_(2 + draw(4), world_options(seed), communicator_options()),
        registry_([this] { return group_.world.now(); }) {
    const int num_ops = 3 + draw(6);
    if (draw(2)) min_size_ = 1;
    if (draw(2)) longest_stall_ = static_cast<uint64_t>(1 + draw(draw(2) ? 2000 : 200000));
    for (int member = 0; member < size(); ++member) {
      programs_.push_back(
          std::make_unique<Program>(&group_, &registry_, member, num_ops, min_size_));
      group_.world.add_member(member, [this, member] {
        stall(member);
        return group_.world.now() >= stalled_until_[member] && programs_[member]->step();
      });
    }
  }

  void check() {
    const int num_faults = draw(5);
    for (int i = 0; i < num_faults; ++i) draw_fault();
    ASSERT_TRUE(run()) << "a live member's call never ended";
    thaw_everybody();
    ASSERT_TRUE(run()) << "a thawed member's call never ended";
    check_results();
    for (int member = 0; member < size(); ++member) {
      const Program& program = *programs_[member];
      for (const std::string& problem : program.problems()) ADD_FAILURE() << problem;
      EXPECT_FALSE(program.late() && was_frozen_.count(member) == 0) << "member " << member;
      if (!group_.world.alive(member) || may_be_left_out_.count(member) != 0) continue;
      if (longest_stall_ > kHarmlessStall) continue;
      // The few wait for the many, and give up.
      if (!min_size_ && 2 * may_be_left_out_.size() > num_alive()) continue;
      // Failed in the last op, which others had the result of: they do not come any more.
      if (program.out().code == Code::Timeout && somebody_succeeded()) continue;
      EXPECT_FALSE(spared_ && program.num_restarts() > 0) << "member " << member;
      EXPECT_TRUE(program.succeeded()) << "member " << member << ": " << program.out().str();
    }
  }

  void add_to(Tally* tally) const {
    for (const auto& program : programs_) {
      tally->excluded += program->out().code == Code::WorldTooSmall;
      tally->restarts += program->num_restarts();
      for (const auto& [name, result] : program->results()) {
        const auto n = static_cast<int>(result.contributors.size());
        tally->shrunk += n > 0 && n < size();
      }
    }
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
    options.max_word_delay = draw_time(milliseconds(5));
    return options;
  }
  static Communicator::Options communicator_options() {
    Communicator::Options options;
    options.worker = false;
    return options;
  }

  void draw_fault() {
    const int victim = draw(size());
    const TimePoint when = group_.world.now() + draw_time(milliseconds(draw(2) ? 10 : 60));
    SimWorld& world = group_.world;
    const auto seq = static_cast<uint64_t>(1 + draw(6));
    switch (draw(10)) {
      case 0:
      case 1:
        world.at(when, [this, victim] { kill(victim); });
        return;
      case 2:  // two at once, or one in the other's wake
        world.at(when, [this, victim] { kill(victim); });
        world.at(when + draw_time(milliseconds(30)),
                 [this, victim] { kill((victim + 1) % size()); });
        return;
      case 3:
        may_be_left_out_.insert(victim);
        frozen_.insert(victim);
        was_frozen_.insert(victim);
        world.at(when, [&world, victim] { world.freeze(victim); });
        if (draw(2)) {
          world.at(when + draw_time(milliseconds(4000)), [&world, victim] { world.thaw(victim); });
        }
        return;
      case 4:
        may_be_left_out_.insert(victim);
        group_.engines[victim]->inject(seq,
                                       {Fault::Kind::Delay, {}, draw_time(milliseconds(3000))});
        return;
      case 5:  // one member alone believes that another one is lost
        group_.engines[victim]->inject(
            seq,
            {Fault::Kind::Fail, Status(Code::PeerLost, "mistaken", {(victim + 1) % size()}), {}});
        return;
      case 6:
        spared_ = false;
        world.at(when, [this, victim] { group_[victim].abort(Status(Code::Aborted, "enough")); });
        return;
      case 7:                // a second failure, while the group is built
        if (draw(4) == 0) {  // who is refused something goes, and starts over
          spared_ = false;
          may_be_left_out_.insert(victim);
          group_.engines[victim]->inject_into_rebuild(Status(Code::Internal, "no descriptors"));
        } else {
          group_.engines[victim]->inject_into_rebuild(Status(Code::Timeout, "not in time"));
        }
        world.at(when, [this, victim] { kill((victim + 1) % size()); });
        return;
      case 8:
        spared_ = false;
        world.at(when, [this, victim] { programs_[victim]->start_over_soon(); });
        return;
      case 9:
        spared_ = false;
        world.at(when, [this, victim] { programs_[victim]->start_over_now(); });
        return;
    }
  }

  // As when the processor is given to others, at any point.
  void stall(int member) {
    SimWorld& world = group_.world;
    if (longest_stall_ == 0 || world.random(40) != 0 || world.now() < stalled_until_[member])
      return;
    stalled_until_[member] = world.now() + microseconds(world.random(longest_stall_));
    world.stop_at(stalled_until_[member]);
  }

  void kill(int victim) {
    if (num_alive() > 1) group_.world.kill(victim);
  }

  bool somebody_succeeded() const {
    return std::any_of(programs_.begin(), programs_.end(),
                       [](const auto& program) { return program->succeeded(); });
  }

  size_t num_alive() const {
    size_t num_alive = 0;
    for (int member = 0; member < size(); ++member) num_alive += group_.world.alive(member);
    return num_alive;
  }

  bool run() {
    const auto done = [&] {
      for (int member = 0; member < size(); ++member) {
        if (frozen_.count(member) != 0 || !group_.world.alive(member)) continue;
        if (!programs_[member]->over()) return false;
      }
      return true;
    };
    return group_.world.run(done, seconds(120));
  }

  void thaw_everybody() {
    const TimePoint later = group_.world.now() + milliseconds(5000);
    group_.world.run([&] { return group_.world.now() >= later; }, seconds(10));
    for (int member : frozen_) group_.world.thaw(member);
    frozen_.clear();
  }

  void check_results() {
    std::map<OpName, Result> agreed;
    for (const auto& program : programs_) {
      for (const auto& [name, result] : program->results()) {
        const auto known = agreed.emplace(name, result).first;
        EXPECT_EQ(known->second.sum, result.sum) << "op " << name.second;
        if (result.contributors.empty()) continue;
        if (known->second.contributors.empty()) known->second = result;
        EXPECT_EQ(known->second.contributors, result.contributors);
        uint64_t sum = 0;
        for (const std::string& handle : result.contributors) {
          sum += input_of(group_.engines[0]->initial_rank(handle), name);
        }
        EXPECT_EQ(result.sum, sum) << "not the sum of what its contributors brought";
      }
    }
  }

  std::mt19937_64 random_;
  SimGroup group_;
  MemoryRegistry registry_;
  std::vector<std::unique_ptr<Program>> programs_;
  std::set<int> frozen_, was_frozen_, may_be_left_out_;
  std::map<int, TimePoint> stalled_until_;
  uint64_t longest_stall_ = 0;   // us
  bool spared_ = true;           // nobody aborts
  std::optional<int> min_size_;  // of all
};

TEST(RetrySimulation, EverySeedKeepsThePromises) {
  const char* replay = std::getenv("SIM_SEED");
  const uint64_t first = replay != nullptr ? std::strtoull(replay, nullptr, 10) : 1;
  const uint64_t last = replay != nullptr ? first : kSeeds;
  Tally tally;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("replay with SIM_SEED=" + std::to_string(seed));
    Schedule schedule(seed);
    schedule.check();
    schedule.add_to(&tally);
    if (HasFailure()) return;
  }
  std::printf("excluded %d restarts %d shrunk %d\n", tally.excluded, tally.restarts, tally.shrunk);
}

}  // namespace
}  // namespace gpumode
