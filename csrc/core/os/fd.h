#pragma once

#include <utility>

namespace gpumode::os {

// Owns a file descriptor. Every descriptor of ours is close-on-exec; one marked close_on_fork is
// also closed in forked children, so that a child that outlives its parent (a DataLoader worker)
// does not keep the parent's sockets open and look alive to the peers.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd, bool close_on_fork = false);
  ~Fd() { reset(); }
  Fd(Fd&& o) noexcept : fd_(std::exchange(o.fd_, -1)), guarded_(std::exchange(o.guarded_, false)) {}
  Fd& operator=(Fd&& o) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  bool guarded_ = false;
};

}  // namespace gpumode::os
