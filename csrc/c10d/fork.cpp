#include "c10d/fork.h"

#include <pthread.h>

#include <utility>
#include <vector>

namespace gpumode {
namespace {

int count = 0;  // written by the only thread of a forked child

struct Survivors {
  std::mutex mutex;  // guards the list
  std::vector<std::pair<std::mutex*, std::function<void()>>> list;

  void lock() {
    mutex.lock();
    for (auto& [each, in_child] : list) {
      each->lock();
    }
  }
  void unlock() {
    for (auto& [each, in_child] : list) {
      each->unlock();
    }
    mutex.unlock();
  }
};

Survivors& survivors() {
  static auto* instance = new Survivors;  // used during exit
  return *instance;
}

}  // namespace

int fork_count() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });
  static_cast<void>(registered);
  return count;
}

void survive_fork(std::mutex& mutex, std::function<void()> in_child) {
  static const int registered =
      pthread_atfork([] { survivors().lock(); }, [] { survivors().unlock(); },
                     [] {
                       for (auto& [each, in_child] : survivors().list) {
                         in_child();
                       }
                       survivors().unlock();
                     });
  static_cast<void>(registered);
  std::lock_guard<std::mutex> lock(survivors().mutex);
  survivors().list.emplace_back(&mutex, std::move(in_child));
}

}  // namespace gpumode
