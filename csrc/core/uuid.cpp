#include "core/uuid.h"

namespace gpumode {

int64_t uuid_of(const std::vector<std::string>& words) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const auto& word : words) {
    for (const char c : word) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    }
    hash = (hash ^ 0xff) * 1099511628211ULL;  // so that ("ab", "c") is not ("a", "bc")
  }
  return static_cast<int64_t>(hash >> 1);
}

}  // namespace gpumode
