#pragma once

#include <cstdint>

#include "core/status.h"

namespace gpumode {

// Copies `nbytes` bytes from `src` to `dst` in one kernel on `stream` (a cudaStream_t of the
// current device), and returns once it is launched.
//
// Any pointers that the current device can access will do: its own memory, a peer's over NVLink (a
// put or a get), pinned or managed host memory; of any alignment, but not overlapping. Unlike a
// copy engine it runs inside a CUDA graph as a kernel, and on at most `num_sms` multiprocessors (0:
// all), so that it can share the device with a matmul.
//
// InvalidArgument: nbytes or num_sms is negative, or a pointer is null and nbytes is not 0.
// Internal: CUDA refused the launch. Nothing was copied then.
Status copy(void* dst, const void* src, int64_t nbytes, int num_sms, void* stream);

}  // namespace gpumode
