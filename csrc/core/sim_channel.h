#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "core/channel.h"

namespace gpumode {

// A world of simulated members: who lives, who is frozen, what each announced, and the time.
//
// In virtual time one thread runs everybody: step() drives the members in an order that the seed
// decides and moves the clock when nobody moves, so that a seed is a schedule. In real time the
// members are threads of the test, and only announcements, liveness and faults are simulated.
class SimWorld {
 public:
  enum class Time { Virtual, Real };
  struct Options {
    Time time = Time::Virtual;
    uint64_t seed = 0;
    Duration detection_delay{};  // from a death until others know of it
    Duration max_op_delay{};     // an op takes a random time up to this once everybody is in it
    Duration max_word_delay{};   // until another member sees what one has announced
  };

  // What a member has announced, and from when on each other one sees it, by rank.
  template <typename T>
  struct Word {
    T value;
    std::vector<TimePoint> seen_from;
  };

  // What the members of one epoch have announced, by rank. Kept for ever.
  struct Board {
    std::vector<int> members;  // their numbers in the world
    std::vector<std::map<uint64_t, Word<Signature>>> entered;
    std::vector<std::map<uint64_t, Word<bool>>> done;
    std::vector<std::optional<Word<std::tuple<Status, uint64_t>>>> failed;
    std::vector<std::optional<Word<bool>>> left;
    std::vector<std::vector<TimePoint>> last_seen_from;  // words arrive in their order
    std::vector<std::map<uint64_t, uint64_t>> brought;   // by op: a member's value, see FakeEngine
    std::map<std::tuple<int, int, int>, int> mail;       // (from, to, tag) -> messages not received
  };

  explicit SimWorld(Options options) : options_(options), random_(options.seed) {}

  bool is_virtual() const { return options_.time == Time::Virtual; }
  TimePoint now() const;

  void kill(int member);  // never runs again
  void freeze(int member);
  void thaw(int member);
  bool alive(int member) const;       // the truth
  bool seen_alive(int member) const;  // what others know

  // Virtual time. Runs `event` when the clock reaches `when`.
  void at(TimePoint when, std::function<void()> event);
  // The clock stops at `when`. Nothing in real time.
  void stop_at(TimePoint when);
  // Virtual time. `drive` makes one step of a member and returns whether anything moved.
  void add_member(int member, std::function<bool()> drive);
  // Virtual time. Drives everybody who can run, or else moves the clock.
  void step();
  // Virtual time. Steps until `done`; false if that took longer than `limit`.
  bool run(const std::function<bool()>& done, Duration limit);
  uint64_t random(uint64_t bound);  // in [0, bound)

  // For SimChannel and FakeEngine.
  std::shared_ptr<Board> join(int64_t uuid, const std::vector<int>& members);
  Duration draw_op_delay() { return draw_delay(options_.max_op_delay); }
  template <typename F>
  auto read(F f) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return f();
  }
  template <typename F>
  auto write(F f) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++version_;
    changed_.notify_all();
    return f();
  }
  // Within read and write: the time, and when other members will see what `rank` announces now.
  TimePoint now_locked() const { return is_virtual() ? now_ : Clock::now(); }
  std::vector<TimePoint> announce_locked(Board* board, int rank);
  uint64_t version() const;
  // Real time. Returns at `until`, or when the version is not `seen` any more.
  void wait(uint64_t seen, TimePoint until);

 private:
  struct Member {
    std::function<bool()> drive;
    bool frozen = false;
    std::optional<TimePoint> died_at;
  };

  bool drive(const std::vector<int>& members);
  Duration draw_delay(Duration max);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t version_ = 0;
  TimePoint now_{};  // virtual
  std::mt19937_64 random_;
  std::map<int, Member> members_;
  std::map<int64_t, std::shared_ptr<Board>> boards_;
  std::multimap<TimePoint, std::function<void()>> events_;
};

// One member's view of one epoch of a SimWorld.
class SimChannel : public Channel {
 public:
  SimChannel(SimWorld* world, std::shared_ptr<SimWorld::Board> board, int rank)
      : world_(world), board_(std::move(board)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(board_->members.size()); }
  TimePoint now() const override { return world_->now(); }
  Presence presence(int rank) const override;
  void announce(uint64_t seq, const Signature& signature) override;
  bool entered(int rank, uint64_t seq, Signature* signature) const override;
  void announce_done(uint64_t seq) override;
  bool done(int rank, uint64_t seq) const override;
  void announce_failure(const Status& why, uint64_t first_unfinished) override;
  bool failed(int rank, Status* why, uint64_t* first_unfinished) const override;

  void bring(uint64_t seq, uint64_t value);
  uint64_t brought(int rank, uint64_t seq) const;

  // This rank has gone to another membership, or could not join this one.
  void leave();

  // Point-to-point messages carry no bytes here: only that they were sent.
  void send(int to, int tag);
  // The rank whose message was received, or -1 if there is none yet.
  int receive(int from, int tag);

 private:
  template <typename T>
  bool sees(const SimWorld::Word<T>& word) const {
    return world_->now_locked() >= word.seen_from[rank_];
  }

  SimWorld* const world_;
  const std::shared_ptr<SimWorld::Board> board_;
  const int rank_;
};

}  // namespace gpumode
