#pragma once

#include <functional>
#include <mutex>

namespace gpumode {

// How many forks lie between the process that first asked and this one. Threads and peers do not
// survive a fork, so what was made under another count must be left alone.
int fork_count();

// Leaves the mutex free in every forked child, whatever another thread did at that moment, and
// calls `in_child` there, for state that the threads of the parent owned. For what lives as long as
// the process.
void survive_fork(std::mutex& mutex, std::function<void()> in_child);

}  // namespace gpumode
