#include "core/status.h"

namespace gpumode {

const char* name(Code code) {
  switch (code) {
    case Code::Ok:
      return "Ok";
    case Code::Aborted:
      return "Aborted";
    case Code::Timeout:
      return "Timeout";
    case Code::PeerLost:
      return "PeerLost";
    case Code::Mismatch:
      return "Mismatch";
    case Code::WorldTooSmall:
      return "WorldTooSmall";
    case Code::InvalidArgument:
      return "InvalidArgument";
    case Code::Internal:
      return "Internal";
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
