#include "host/peer_watch.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>

#include "core/os/process_life.h"
#include "core/os/thread.h"

namespace gpumode::host {
namespace {

// Marks the events of pidfds.
constexpr uint64_t kProcess = uint64_t{1} << 63;

}  // namespace

// Lives until the process ends: the thread is detached, and peers may be watched by objects that
// are destroyed at exit. A forked child starts with a new one, since threads do not survive a fork.
struct PeerWatch::State {
  struct Watched {
    int socket, pidfd;
    uint64_t life;  // 0: none
    std::function<void(Presence)> on_gone;
  };

  State() : epoll(::epoll_create1(EPOLL_CLOEXEC), true) {
    os::start_thread("gpumode_watch", [this] { run(); }).detach();
  }

  void watch(int fd, uint32_t events, uint64_t id) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void unwatch(const Watched& peer) const {
    ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, peer.socket, nullptr);
    if (peer.pidfd >= 0) ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, peer.pidfd, nullptr);
    if (peer.life != 0) os::ProcessLife::instance().unwatch(peer.life);
  }

  // The first sign of death counts; later ones find nothing.
  void gone(uint64_t id, Presence how) {
    // The callback runs under the lock, so that remove() can promise that it is over.
    std::lock_guard<std::mutex> lock(mutex);
    auto it = peers.find(id);
    if (it == peers.end()) return;
    unwatch(it->second);
    auto on_gone = std::move(it->second.on_gone);
    peers.erase(it);
    on_gone(how);
  }

  void run() {
    epoll_event events[16];
    for (;;) {
      const int n = ::epoll_wait(epoll.get(), events, 16, -1);
      for (int i = 0; i < n; ++i) {
        const uint64_t id = events[i].data.u64;
        gone(id & ~kProcess, (id & kProcess) != 0 ? Presence::Dead : Presence::Left);
      }
    }
  }

  os::Fd epoll;
  std::mutex mutex;
  std::map<uint64_t, Watched> peers;
  uint64_t next_id = 1;
};

namespace {

std::mutex instance_mutex;
void* current_state = nullptr;

}  // namespace

PeerWatch& PeerWatch::instance() {
  static PeerWatch watch;
  return watch;
}

PeerWatch::State& PeerWatch::state() {
  std::lock_guard<std::mutex> lock(instance_mutex);
  static const int registered =
      pthread_atfork([] { instance_mutex.lock(); }, [] { instance_mutex.unlock(); },
                     [] {
                       current_state = nullptr;
                       instance_mutex.unlock();
                     });
  (void)registered;
  if (current_state == nullptr) current_state = new State;
  return *static_cast<State*>(current_state);
}

uint64_t PeerWatch::add(int socket, int pidfd, const os::SharedMemory& life,
                        std::function<void(Presence)> on_gone) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const uint64_t id = s.next_id++;
  uint64_t life_id = 0;
  if (life)
    life_id = os::ProcessLife::instance().watch(life, [&s, id] { s.gone(id, Presence::Dead); });
  s.peers[id] = {socket, pidfd, life_id, std::move(on_gone)};
  // Nothing is ever sent on the socket once it is watched: readable means closed.
  s.watch(socket, EPOLLIN | EPOLLRDHUP, id);
  if (pidfd >= 0) s.watch(pidfd, EPOLLIN, id | kProcess);
  return id;
}

void PeerWatch::remove(uint64_t id) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.peers.find(id);
  if (it == s.peers.end()) return;
  s.unwatch(it->second);
  s.peers.erase(it);
}

}  // namespace gpumode::host
