#pragma once

#include "c10d/backend.h"

#ifndef GPUMODE_C10D_MUTABLE_RANK
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace gpumode {

// A process group whose rank and size follow its backend through reconfigure(). torch asks a plain
// group's backend itself from 2.14 on; before, a group's rank and size never change, but the
// functions that tell them are virtual. Python sees its base class, so that checks of
// `type(group) is ProcessGroup` hold.
class Group : public ::c10d::ProcessGroup {
 public:
  Group(c10::intrusive_ptr<::c10d::Store> store, c10::intrusive_ptr<Backend> backend);

  int getRank() const override { return backend_->current_rank(); }
  int getSize() const override { return backend_->current_size(); }
  // torch refuses these two for groups of a custom type.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return backend_->getSequenceNumberForGroup(); }

 private:
  c10::intrusive_ptr<Backend> backend_;
};

}  // namespace gpumode
#endif
