#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "core/status.h"

namespace gpumode::os {

// Internal, naming the call that failed and the system's reason (errno).
inline Status last_error(const std::string& call) {
  return {Code::Internal, call + ": " + std::strerror(errno)};
}

}  // namespace gpumode::os
