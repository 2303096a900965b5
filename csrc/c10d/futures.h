#pragma once

#include <chrono>
#include <functional>

namespace gpumode {

// Runs `job` on a thread that completes futures. Python callbacks of a future run inline where it
// is completed and take the GIL there, so the thread of a communicator, which must never wait,
// hands completions over. Jobs begin in the order of their arrival, one after the other, except
// that nobody waits for a job that is stuck: a callback may wait for another future. They never run
// in a forked child.
void run_on_future_thread(std::function<void()> job);

// Drops the jobs that have not begun, and later ones, and waits for the running ones for
// `patience`. Called once, at exit, without the GIL: a thread that asks a finalising interpreter
// for the GIL would be ended in the middle of C++ frames, which aborts the process.
void stop_future_threads(std::chrono::milliseconds patience);

}  // namespace gpumode
