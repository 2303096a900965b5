#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace gpumode::os {

// Sleeps while *word == expected, at most `timeout`; wakes spuriously too. The word may lie in
// memory shared between processes.
void futex_wait(const std::atomic<uint32_t>* word, uint32_t expected,
                std::chrono::nanoseconds timeout);
// Wakes all that sleep on the word.
void futex_wake(const std::atomic<uint32_t>* word);

}  // namespace gpumode::os
