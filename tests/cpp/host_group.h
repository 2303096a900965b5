#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/communicator.h"
#include "host/host_engine.h"

namespace gpumode {

// Ranks of one group on real HostEngines, each a thread of this process.
class HostGroup {
 public:
  explicit HostGroup(int size, Duration timeout = std::chrono::seconds(30)) {
    for (int r = 0; r < size; ++r) {
      Status status;
      host::EngineOptions options;
      options.initial_rank = r;
      auto engine = host::make_engine(options, &status);
      EXPECT_TRUE(status.ok()) << status.str();
      handles_.push_back(engine->handle());
      Communicator::Options communicator_options;
      communicator_options.timeout = timeout;
      ranks_.push_back(std::make_unique<Communicator>(std::move(engine), communicator_options));
    }
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    rebuild(1, all);
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Communicator& rank(int r) { return *ranks_[r]; }
  const std::string& handle(int r) const { return handles_[r]; }
  // As if the process had died.
  void kill(int r) { ranks_[r].reset(); }

  // Calls f(rank, communicator) on a thread for each of `members`.
  void run(const std::vector<int>& members, const std::function<void(int, Communicator&)>& f) {
    std::vector<std::thread> threads;
    threads.reserve(members.size());
    for (const int r : members) threads.emplace_back([&, r] { f(r, *ranks_[r]); });
    for (auto& thread : threads) thread.join();
  }
  void run(const std::function<void(int, Communicator&)>& f) {
    std::vector<int> all;
    for (int r = 0; r < size(); ++r) {
      if (ranks_[r]) all.push_back(r);
    }
    run(all, f);
  }

  void rebuild(int64_t uuid, const std::vector<int>& members) {
    Membership membership;
    membership.uuid = uuid;
    for (const int r : members) membership.handles.push_back(handles_[r]);
    run(members, [&](int r, Communicator& communicator) {
      const auto new_rank = std::find(members.begin(), members.end(), r) - members.begin();
      const Status status =
          communicator.rebuild(membership, static_cast<int>(new_rank), std::chrono::seconds(20));
      EXPECT_TRUE(status.ok()) << "rank " << r << ": " << status.str();
    });
  }

 private:
  std::vector<std::string> handles_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

inline std::shared_ptr<Op> submit(Communicator& communicator, OpDesc part, bool blocking = true) {
  SubmitOptions options;
  options.blocking = blocking;
  std::vector<OpDesc> parts;
  parts.push_back(std::move(part));
  return communicator.submit(std::move(parts), std::move(options));
}

template <class T>
Buffer buffer_of(std::vector<T>& values) {
  return {values.data(), values.size() * sizeof(T)};
}

}  // namespace gpumode
