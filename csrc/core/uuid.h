#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpumode {

// A number that no other list of words has, for all practical purposes; not negative.
int64_t uuid_of(const std::vector<std::string>& words);

}  // namespace gpumode
