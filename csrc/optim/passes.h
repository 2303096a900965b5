#pragma once

#include <vector>

#include "optim/rules.h"

namespace gpumode::optim {

// Runs passes over tensors on the CPU, with torch's threads. The result does not depend on their
// number.
class Passes {
 public:
  // After each pass but the last its sums are in the jobs; with `keeps_sums`, after the last, too.
  void run(std::vector<Job>* jobs, const std::vector<Pass>& passes, const StepOptions& options,
           bool keeps_sums = false);

 private:
  void cut(const std::vector<Job>& jobs);
  void add_up(std::vector<Job>* jobs);

  // Kept for their memory.
  std::vector<Piece> pieces_;
  std::vector<double> sums_;
};

}  // namespace gpumode::optim
