#include "core/os/process_life.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/os/futex.h"
#include "core/os/thread.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace gpumode::os {

// What the kernel finds through the list of robust futexes of the thread that owns the word.
struct ProcessLife::Word {
  robust_list node;
  std::atomic<uint32_t> word;
};

namespace {

// As in <linux/futex.h> since 5.16; older headers lack it.
struct WaitOne {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};
constexpr uint32_t kShared32 = 2;
constexpr size_t kMaxWaits = 128;

ProcessLife::Word& word_in(const SharedMemory& memory) {
  return *reinterpret_cast<ProcessLife::Word*>(memory.data());
}

bool marked_dead(const SharedMemory& life) {
  return (word_in(life).word.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

}  // namespace

struct ProcessLife::State {
  struct Watched {
    const SharedMemory* life;
    std::function<void()> on_death;
  };

  void start();
  void run();
  // Under mutex: takes out what has died.
  std::vector<Watched> take_dead();
  // Under mutex: what to wait for.
  void list_waits(std::vector<WaitOne>* waits) const;

  Fd fd;
  SharedMemory mine;
  robust_list_head head{};  // of our thread

  std::mutex mutex;
  std::condition_variable started;
  bool ready = false;
  std::atomic<uint32_t> changes{0};  // of `watched`; a futex
  std::map<uint64_t, Watched> watched;
  uint64_t next_id = 1;
};

ProcessLife::ProcessLife() : state_(new State) { state_->start(); }

void ProcessLife::State::start() {
  WaitOne probe{1, reinterpret_cast<uint64_t>(&changes), kShared32, 0};
  const long result = ::syscall(SYS_futex_waitv, &probe, 1, 0, nullptr, 0);
  if (!(result < 0 && errno == EAGAIN)) return;  // the kernel has no such call
  if (!SharedMemory::create(sizeof(Word), &mine, &fd).ok()) return;
  start_thread("gpumode_life", [this] { run(); }).detach();
  std::unique_lock<std::mutex> lock(mutex);
  started.wait(lock, [this] { return ready; });
}

// The thread that owns the word. The kernel walks its list of robust futexes when it exits, which
// it does only with the whole process. It uses no other robust mutex, so the list may be ours.
void ProcessLife::State::run() {
  Word& word = word_in(mine);
  head.futex_offset = reinterpret_cast<char*>(&word.word) - reinterpret_cast<char*>(&word.node);
  head.list.next = &word.node;
  word.node.next = &head.list;
  // The waiters' bit makes the kernel wake one of those who wait; that one wakes the others.
  word.word.store(static_cast<uint32_t>(::syscall(SYS_gettid)) | FUTEX_WAITERS);
  ::syscall(SYS_set_robust_list, &head, sizeof(head));
  {
    std::lock_guard<std::mutex> lock(mutex);
    ready = true;
    started.notify_all();
  }
  std::vector<WaitOne> waits;
  for (;;) {
    std::vector<Watched> dead;
    {
      std::lock_guard<std::mutex> lock(mutex);
      dead = take_dead();
      if (dead.empty()) list_waits(&waits);
    }
    for (const Watched& peer : dead) peer.on_death();
    if (!dead.empty()) continue;
    ::syscall(SYS_futex_waitv, waits.data(), waits.size(), 0, nullptr, 0);
  }
}

std::vector<ProcessLife::State::Watched> ProcessLife::State::take_dead() {
  std::vector<Watched> dead;
  for (auto it = watched.begin(); it != watched.end();) {
    if (!marked_dead(*it->second.life)) {
      ++it;
      continue;
    }
    futex_wake(&word_in(*it->second.life).word);
    dead.push_back(std::move(it->second));
    it = watched.erase(it);
  }
  return dead;
}

void ProcessLife::State::list_waits(std::vector<WaitOne>* waits) const {
  waits->clear();
  const auto add = [waits](const std::atomic<uint32_t>& word) {
    const uint32_t value = word.load(std::memory_order_acquire);
    waits->push_back(
        {value & ~uint32_t{FUTEX_OWNER_DIED}, reinterpret_cast<uint64_t>(&word), kShared32, 0});
  };
  add(changes);
  for (const auto& [id, peer] : watched) {
    if (waits->size() == kMaxWaits) break;  // the other signs of death remain for the rest
    add(word_in(*peer.life).word);
  }
}

namespace {

std::mutex instance_mutex;
ProcessLife* current = nullptr;

}  // namespace

ProcessLife& ProcessLife::instance() {
  std::lock_guard<std::mutex> lock(instance_mutex);
  // Neither the thread nor the word of the parent is the child's.
  static const int registered =
      pthread_atfork([] { instance_mutex.lock(); }, [] { instance_mutex.unlock(); },
                     [] {
                       current = nullptr;
                       instance_mutex.unlock();
                     });
  (void)registered;
  if (current == nullptr) current = new ProcessLife;
  return *current;
}

const Fd& ProcessLife::fd() const { return state_->fd; }

Status ProcessLife::map(const Fd& fd, SharedMemory* memory) {
  return SharedMemory::map(fd, sizeof(Word), false, memory);
}

uint64_t ProcessLife::watch(const SharedMemory& life, std::function<void()> on_death) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const uint64_t id = state_->next_id++;
  state_->watched[id] = {&life, std::move(on_death)};
  state_->changes.fetch_add(1, std::memory_order_release);
  futex_wake(&state_->changes);
  return id;
}

void ProcessLife::unwatch(uint64_t id) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->watched.erase(id) == 0) return;
  state_->changes.fetch_add(1, std::memory_order_release);
  futex_wake(&state_->changes);
}

}  // namespace gpumode::os
