#pragma once

#include "c10d/backend.h"

#ifndef GPUMODE_C10D_MUTABLE_RANK
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace gpumode {

// Overrides splitGroup, whose parameters differ between torch's versions.
template <typename SplitGroup>
class SplittingGroup;
template <typename... Args>
class SplittingGroup<c10::intrusive_ptr<::c10d::ProcessGroup> (::c10d::ProcessGroup::*)(Args...)>
    : public ::c10d::ProcessGroup {
 public:
  using ::c10d::ProcessGroup::ProcessGroup;
  c10::intrusive_ptr<::c10d::ProcessGroup> splitGroup(Args... args) override {
    return following(::c10d::ProcessGroup::splitGroup(args...));
  }

 protected:
  virtual c10::intrusive_ptr<::c10d::ProcessGroup> following(
      c10::intrusive_ptr<::c10d::ProcessGroup> plain) = 0;
};

// A process group whose rank and size follow its backend through reconfigure(). torch asks a plain
// group's backend itself from 2.14 on; before, a group's rank and size never change, but the
// functions that tell them are virtual. Python sees its base class, so that checks of
// `type(group) is ProcessGroup` hold.
class Group : public SplittingGroup<decltype(&::c10d::ProcessGroup::splitGroup)> {
 public:
  Group(c10::intrusive_ptr<::c10d::Store> store, c10::intrusive_ptr<Backend> backend);

  int getRank() const override { return backend_->current_rank(); }
  int getSize() const override { return backend_->current_size(); }
  // torch refuses these two for groups of a custom type.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return backend_->getSequenceNumberForGroup(); }

 private:
  // The group that torch made of a split of our backend, as a Group.
  c10::intrusive_ptr<::c10d::ProcessGroup> following(
      c10::intrusive_ptr<::c10d::ProcessGroup> plain) override;

  c10::intrusive_ptr<Backend> backend_;
};

}  // namespace gpumode
#endif
