#pragma once

#include <memory>

#include "core/engine.h"

namespace gpumode {

// The data plane of a new group; the one place of this folder that knows which ones there are.
// Throws if the operating system refuses what it needs.
std::unique_ptr<Engine> choose_engine(int rank);

}  // namespace gpumode
