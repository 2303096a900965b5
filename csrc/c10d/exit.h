#pragma once

#include <chrono>

// The end of a process with threads in our calls. Python (up to 3.13) ends a thread that asks a
// finalising interpreter for the GIL in the middle of its C++ frames, and that aborts the process.
namespace gpumode {

// A call that may wait, for as long as it lasts; without the GIL.
class BlockingCall {
 public:
  BlockingCall();
  ~BlockingCall();
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;
};

// Called at exit, without the GIL, when nothing is in flight any more. Returns when all other
// threads have left their blocking calls, at most after `patience`; from then on a thread that
// calls is held for ever, as Python 3.14 does.
void hold_other_threads(std::chrono::milliseconds patience);
void hold_if_exiting();

}  // namespace gpumode
