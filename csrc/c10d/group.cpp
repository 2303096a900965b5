#include "c10d/group.h"

#ifndef GPUMODE_C10D_MUTABLE_RANK
#include <utility>

namespace gpumode {

Group::Group(c10::intrusive_ptr<::c10d::Store> store, c10::intrusive_ptr<Backend> backend)
    : ::c10d::ProcessGroup(std::move(store), backend->getRank(), backend->getSize()),
      backend_(std::move(backend)) {
  setDefaultBackend(CUSTOM);
  setBackend(c10::DeviceType::CPU, CUSTOM, backend_);
  setBackend(c10::DeviceType::CUDA, CUSTOM, backend_);
}

}  // namespace gpumode
#endif
