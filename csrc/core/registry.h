#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/channel.h"

namespace gpumode {

// Where the members of a group meet outside of it: keys and values that outlive members. Every call
// is bounded, and throws if there is no answer.
class Registry {
 public:
  virtual ~Registry() = default;

  virtual TimePoint now() const = 0;
  virtual void sleep_until(TimePoint time) = 0;

  virtual void set(const std::string& key, const std::string& value) = 0;
  // Sets the key if nobody has; returns what it holds then, for everybody and for ever.
  virtual std::string set_once(const std::string& key, const std::string& value) = 0;
  // Nothing where nobody has set the key.
  virtual std::vector<std::optional<std::string>> get(const std::vector<std::string>& keys) = 0;
};

}  // namespace gpumode
