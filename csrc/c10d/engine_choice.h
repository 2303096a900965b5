#pragma once

#include <memory>
#include <string>

#include "core/engine.h"

namespace gpumode {

// The data plane of a new group; the one place of this folder that knows which ones there are.
// A rank that waits polls for `spin` before it sleeps; negative: the data plane decides. Throws if
// the operating system refuses what it needs.
std::unique_ptr<Engine> choose_engine(int rank, Duration spin);

// InvalidArgument if no engine here can reach the member behind the handle, or there is none.
Status check_handle(const std::string& handle);

}  // namespace gpumode
