#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/retry.h"
#include "host_group.h"
#include "memory_registry.h"

namespace gpumode {

// A group of threads, each with what a retried op needs.
class RetryGroup : public HostGroup {
 public:
  explicit RetryGroup(int size) : HostGroup(size), lineages_(static_cast<size_t>(size)) {
    auto everybody = std::make_shared<Membership>();
    everybody->uuid = 1;
    for (int r = 0; r < size; ++r) everybody->handles.push_back(handle(r));
    for (int r = 0; r < size; ++r) {
      lineages_[r].joined(everybody, r);
      scratch_.push_back(std::make_unique<Scratch>());
    }
  }

  // One call on `member`. Unless `blocking` it is to be stepped.
  std::unique_ptr<Retry> begin(int member, OpDesc part, bool blocking = true,
                               Duration timeout = std::chrono::seconds(20)) {
    Communicator* communicator = &rank(member);
    Retry::Options options;
    options.deadline = Clock::now() + timeout;
    options.submit = [communicator, blocking](std::vector<OpDesc> parts, uint32_t attempt,
                                              Duration limit) {
      SubmitOptions submit;
      submit.blocking = blocking;
      submit.attempt = attempt;
      submit.timeout = limit;
      return communicator->submit(std::move(parts), std::move(submit));
    };
    return std::make_unique<Retry>(communicator, &registry_, &lineages_[member],
                                   scratch_[member].get(), std::vector<OpDesc>{std::move(part)},
                                   std::move(options));
  }

  // The ranks that they had when the group was made.
  std::vector<int> contributors(int member, const Retry& retry) {
    std::vector<int> ranks;
    if (retry.contributors() == nullptr) return ranks;
    for (const auto& handle : retry.contributors()->handles) {
      ranks.push_back(rank(member).initial_rank(handle));
    }
    return ranks;
  }

 private:
  MemoryRegistry registry_;
  std::vector<Lineage> lineages_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

}  // namespace gpumode
