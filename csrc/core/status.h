#pragma once

#include <string>
#include <utility>
#include <vector>

namespace gpumode {

// Why an op ended. Each code but Ok is one public Python exception.
enum class Code {
  Ok,
  Aborted,          // somebody called abort, or rebuilt the group under the op
  Timeout,          // the op's deadline passed
  PeerLost,         // a member that the op needed is gone: Status::ranks names it
  Mismatch,         // members disagree on what must agree
  WorldTooSmall,    // no side is left that may go on
  InvalidArgument,  // the caller's mistake; nothing was changed
  Internal,         // ours, or the operating system's
};

const char* name(Code code);
// "rank 2", "ranks 1, 2 and 5", for messages.
std::string name_ranks(const std::vector<int>& ranks);

class Status {
 public:
  Status() = default;
  Status(Code code, std::string message, std::vector<int> ranks = {})
      : code(code), message(std::move(message)), ranks(std::move(ranks)) {}

  bool ok() const { return code == Code::Ok; }
  std::string str() const;

  Code code = Code::Ok;
  std::string message;
  std::vector<int> ranks;  // ranks of the group that the failure is about
};

}  // namespace gpumode
