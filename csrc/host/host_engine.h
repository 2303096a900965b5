#pragma once

#include <memory>

#include "core/engine.h"

namespace gpumode::host {

struct EngineOptions {
  // Rank at creation; makes handles sort in rank order.
  int initial_rank = 0;
  // How long a rank that waits spins before it sleeps; negative: a default.
  Duration spin = Duration(-1);
};

// The data plane inside one host, over shared memory. Several may live in one process, each a rank.
// Null, with `status` set, if the operating system refuses.
std::unique_ptr<Engine> make_engine(const EngineOptions& options, Status* status);

}  // namespace gpumode::host
