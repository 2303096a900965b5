#pragma once

namespace gpumode {

// How many forks lie between the process that first asked and this one. Threads and peers do not
// survive a fork, so what was made under another count must be left alone.
int fork_count();

}  // namespace gpumode
