#include "host/task.h"

#include <algorithm>

namespace gpumode::host {

std::vector<int> Task::waiting_for() const {
  if (!meeting_.complete()) return meeting_.missing();
  const int me = epoch_.rank();
  std::vector<bool> seen(static_cast<size_t>(epoch_.size()));
  std::vector<int> met{me};
  std::vector<int> culprits;
  seen[me] = true;
  for (size_t i = 0; i < met.size(); ++i) {
    const int rank = met[i];
    const std::vector<int> waits = waits_of(rank);
    const bool is_culprit = waits.empty() || !epoch_.alive(rank);
    if (is_culprit && rank != me) culprits.push_back(rank);
    for (const int q : waits) {
      if (!seen[q]) met.push_back(q);
      seen[q] = true;
    }
  }
  std::sort(culprits.begin(), culprits.end());
  return culprits;
}

}  // namespace gpumode::host
