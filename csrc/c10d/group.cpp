#include "c10d/group.h"

#ifndef GPUMODE_C10D_MUTABLE_RANK
#include <utility>

namespace gpumode {

Group::Group(c10::intrusive_ptr<::c10d::Store> store, c10::intrusive_ptr<Backend> backend)
    : SplittingGroup(std::move(store), backend->getRank(), backend->getSize()),
      backend_(std::move(backend)) {
  setDefaultBackend(CUSTOM);
  setBackend(c10::DeviceType::CPU, CUSTOM, backend_);
  setBackend(c10::DeviceType::CUDA, CUSTOM, backend_);
}

c10::intrusive_ptr<::c10d::ProcessGroup> Group::following(
    c10::intrusive_ptr<::c10d::ProcessGroup> plain) {
  if (plain == nullptr) {
    return plain;  // this rank is not in the split
  }
  auto backend = c10::dynamic_intrusive_pointer_cast<Backend>(plain->getDefaultBackend());
  TORCH_INTERNAL_ASSERT(backend != nullptr);
  auto group = c10::make_intrusive<Group>(plain->getStore(), std::move(backend));
  group->setBoundDeviceId(plain->getBoundDeviceId());
  group->setGroupName(plain->getGroupName());
  group->setGroupDesc(plain->getGroupDesc());
  return group;
}

}  // namespace gpumode
#endif
