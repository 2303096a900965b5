#include "core/sim_channel.h"

#include <algorithm>
#include <cassert>

namespace gpumode {
namespace {

// The clock moves at least this often, so that deadlines are met to within it.
constexpr Duration kTick = std::chrono::milliseconds(50);

}  // namespace

TimePoint SimWorld::now() const {
  if (!is_virtual()) return Clock::now();
  return read([&] { return now_; });
}

void SimWorld::kill(int member) {
  write([&] {
    Member& victim = members_[member];
    if (!victim.died_at) victim.died_at = now_locked();
  });
}

void SimWorld::freeze(int member) {
  write([&] { members_[member].frozen = true; });
}

void SimWorld::thaw(int member) {
  write([&] { members_[member].frozen = false; });
}

bool SimWorld::alive(int member) const {
  return read([&] {
    const auto found = members_.find(member);
    return found == members_.end() || !found->second.died_at;
  });
}

bool SimWorld::seen_alive(int member) const {
  return read([&] {
    const auto found = members_.find(member);
    return found == members_.end() || !found->second.died_at ||
           now_locked() < *found->second.died_at + options_.detection_delay;
  });
}

void SimWorld::at(TimePoint when, std::function<void()> event) {
  write([&] { events_.emplace(when, std::move(event)); });
}

void SimWorld::stop_at(TimePoint when) {
  write([&] {
    if (is_virtual() && events_.count(when) == 0) events_.emplace(when, [] {});
  });
}

void SimWorld::add_member(int member, std::function<bool()> drive) {
  write([&] { members_[member].drive = std::move(drive); });
}

bool SimWorld::drive(const std::vector<int>& members) {
  bool moved = false;
  for (int member : members) {
    const std::function<bool()>* drive = nullptr;
    read([&] {
      const Member& m = members_.at(member);
      if (m.drive && !m.frozen && !m.died_at) drive = &m.drive;
    });
    if (drive != nullptr && (*drive)()) moved = true;
  }
  return moved;
}

void SimWorld::step() {
  assert(is_virtual());
  std::vector<int> order;
  std::vector<std::function<void()>> due;
  write([&] {
    while (!events_.empty() && events_.begin()->first <= now_) {
      due.push_back(std::move(events_.begin()->second));
      events_.erase(events_.begin());
    }
    for (const auto& [member, state] : members_) order.push_back(member);
    std::shuffle(order.begin(), order.end(), random_);
  });
  for (const auto& event : due) event();

  // Some run first, so that members do not move in lockstep; time goes on when nobody can move.
  const size_t num_first = random(order.size() + 1);
  const std::vector<int> first(order.begin(), order.begin() + static_cast<long>(num_first));
  const std::vector<int> rest(order.begin() + static_cast<long>(num_first), order.end());
  const bool moved = drive(first) || drive(rest);
  const auto jitter = std::chrono::microseconds(random(20));
  write([&] {
    TimePoint next = now_ + (moved ? Duration(jitter) : kTick);
    if (!events_.empty()) next = std::min(next, std::max(now_, events_.begin()->first));
    now_ = next;
  });
}

bool SimWorld::run(const std::function<bool()>& done, Duration limit) {
  const TimePoint end = now() + limit;
  while (!done()) {
    if (now() > end) return false;
    step();
  }
  return true;
}

uint64_t SimWorld::random(uint64_t bound) {
  std::lock_guard<std::mutex> lock(mutex_);
  return random_() % bound;
}

std::shared_ptr<SimWorld::Board> SimWorld::join(int64_t uuid, const std::vector<int>& members) {
  return write([&] {
    std::shared_ptr<Board>& board = boards_[uuid];
    if (!board) {
      board = std::make_shared<Board>();
      board->members = members;
      board->entered.resize(members.size());
      board->done.resize(members.size());
      board->failed.resize(members.size());
      board->left.resize(members.size());
      board->last_seen_from.assign(members.size(), std::vector<TimePoint>(members.size()));
      board->brought.resize(members.size());
    }
    return board;
  });
}

Duration SimWorld::draw_delay(Duration max) {
  return Duration(static_cast<Duration::rep>(random(static_cast<uint64_t>(max.count()) + 1)));
}

std::vector<TimePoint> SimWorld::announce_locked(Board* board, int rank) {
  std::vector<TimePoint>& seen_from = board->last_seen_from[rank];
  for (size_t r = 0; r < seen_from.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    const auto max = static_cast<uint64_t>(options_.max_word_delay.count());
    const TimePoint arrives = now_locked() + Duration(max > 0 ? random_() % (max + 1) : 0);
    seen_from[r] = std::max(seen_from[r], arrives);
    if (max > 0 && events_.count(seen_from[r]) == 0) events_.emplace(seen_from[r], [] {});
  }
  return seen_from;
}

uint64_t SimWorld::version() const {
  return read([&] { return version_; });
}

void SimWorld::wait(uint64_t seen, TimePoint until) {
  assert(!is_virtual() && "nobody sleeps in virtual time");
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, until, [&] { return version_ != seen; });
}

Presence SimChannel::presence(int rank) const {
  if (!world_->seen_alive(board_->members[rank])) return Presence::Dead;
  return world_->read([&] {
    const auto& left = board_->left[rank];
    return left && sees(*left) ? Presence::Left : Presence::Here;
  });
}

void SimChannel::leave() {
  world_->write([&] {
    if (!board_->left[rank_]) {
      board_->left[rank_] = {true, world_->announce_locked(board_.get(), rank_)};
    }
  });
}

void SimChannel::announce(uint64_t seq, const Signature& signature) {
  world_->write([&] {
    board_->entered[rank_][seq] = {signature, world_->announce_locked(board_.get(), rank_)};
  });
}

bool SimChannel::entered(int rank, uint64_t seq, Signature* signature) const {
  return world_->read([&] {
    const auto found = board_->entered[rank].find(seq);
    if (found == board_->entered[rank].end() || !sees(found->second)) return false;
    *signature = found->second.value;
    return true;
  });
}

void SimChannel::announce_done(uint64_t seq) {
  world_->write(
      [&] { board_->done[rank_][seq] = {true, world_->announce_locked(board_.get(), rank_)}; });
}

bool SimChannel::done(int rank, uint64_t seq) const {
  return world_->read([&] {
    const auto found = board_->done[rank].lower_bound(seq);
    return found != board_->done[rank].end() && sees(found->second);
  });
}

void SimChannel::announce_failure(const Status& why, uint64_t first_unfinished) {
  world_->write([&] {
    if (board_->failed[rank_]) return;
    board_->failed[rank_] = {{why, first_unfinished}, world_->announce_locked(board_.get(), rank_)};
  });
}

bool SimChannel::failed(int rank, Status* why, uint64_t* first_unfinished) const {
  return world_->read([&] {
    const auto& said = board_->failed[rank];
    if (!said || !sees(*said)) return false;
    std::tie(*why, *first_unfinished) = said->value;
    return true;
  });
}

void SimChannel::bring(uint64_t seq, uint64_t value) {
  world_->write([&] { board_->brought[rank_][seq] = value; });
}

uint64_t SimChannel::brought(int rank, uint64_t seq) const {
  return world_->read([&] { return board_->brought[rank].at(seq); });
}

void SimChannel::send(int to, int tag) {
  world_->write([&] { ++board_->mail[{rank_, to, tag}]; });
}

int SimChannel::receive(int from, int tag) {
  return world_->write([&] {
    for (int r = 0; r < size(); ++r) {
      if (from != kAnySource && from != r) continue;
      const auto found = board_->mail.find({r, rank_, tag});
      if (found == board_->mail.end()) continue;
      if (--found->second == 0) board_->mail.erase(found);
      return r;
    }
    return -1;
  });
}

}  // namespace gpumode
