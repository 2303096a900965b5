#include "core/status.h"

namespace gpumode {

const char* name(Code code) {
  switch (code) {
    case Code::Ok:
      return "Ok";
    case Code::Aborted:
      return "CollectiveAborted";
    case Code::Timeout:
      return "CollectiveTimeout";
    case Code::PeerLost:
      return "PeerLost";
    case Code::Mismatch:
      return "CollectiveMismatch";
    case Code::WorldTooSmall:
      return "WorldTooSmall";
    case Code::InvalidArgument:
      return "ValueError";
    case Code::Internal:
      return "DistBackendError";
  }
  return "?";
}

std::string Status::str() const {
  std::string text = name(code);
  if (!message.empty()) text += ": " + message;
  return text;
}

std::string name_ranks(const std::vector<int>& ranks) {
  if (ranks.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace gpumode
