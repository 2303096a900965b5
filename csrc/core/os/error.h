#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "core/status.h"

namespace gpumode::os {

// Internal, naming the call that failed and the system's reason (errno).
inline Status last_error(const std::string& call) {
  return {Code::Internal, call + ": " + std::generic_category().message(errno)};
}

}  // namespace gpumode::os
