#pragma once

#include <functional>
#include <thread>

namespace gpumode::os {

// Starts a thread of ours: it takes no signals, which are for the threads of the program, and has a
// name (of up to 15 characters) that debuggers show. Throws std::system_error if there is none
// left.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace gpumode::os
