#pragma once

#include <cstddef>

namespace gpumode::host {

// Copies one piece of a message of `message_nbytes` out of shared memory to where the user wants it.
// Of a message that no cache will hold the stores go past the caches: an ordinary store reads the
// line that it overwrites first, which is a third of the traffic.
void copy_out(void* dst, const void* src, size_t nbytes, size_t message_nbytes);

}  // namespace gpumode::host
