#pragma once

#include <algorithm>
#include <chrono>

#include "c10d/torch_version.h"
#include "core/channel.h"

namespace gpumode {

// Nanoseconds overflow after 292 years, and nobody waits for ten.
inline Duration to_duration(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 10));
}

// What a group is created with. Copied, never shared: torch up to 2.13 writes a child's name into
// the options that it got from the parent.
struct BackendOptions : ::c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : Options("gpumode", timeout) {}

  c10::intrusive_ptr<BackendOptions> copy() const {
    return c10::make_intrusive<BackendOptions>(*this);
  }

  // How long a rank that waits polls before it sleeps; negative: the data plane decides.
  std::chrono::microseconds spin{-1};
  // How many of the last ops are remembered.
  size_t flight_record = 1000;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  c10::intrusive_ptr<Options> clone() const override { return copy(); }
#else
  // Not initialised until reconfigure() is called; a field of torch's own from 2.14 on.
  bool enable_reconfigure = false;
#endif
};

}  // namespace gpumode
