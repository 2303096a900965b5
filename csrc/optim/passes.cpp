#include "optim/passes.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace gpumode::optim {
namespace {

// Small enough that all threads have work, large enough that handing it out costs nothing.
constexpr int64_t kPieceLength = int64_t{1} << 14;

}  // namespace

void Passes::cut(const std::vector<Job>& jobs) {
  pieces_.clear();
  for (const Job& job : jobs) {
    for (int64_t begin = 0; begin < job.numel; begin += kPieceLength) {
      pieces_.push_back({&job, begin, std::min(kPieceLength, job.numel - begin)});
    }
  }
}

void Passes::run(std::vector<Job>* jobs, const std::vector<Pass>& passes,
                 const StepOptions& options, bool keeps_sums) {
  cut(*jobs);
  int64_t numel = 0;
  for (const Job& job : *jobs) numel += job.numel;
  const auto num_pieces = static_cast<int64_t>(pieces_.size());
  const int64_t grain = 2 * kPieceLength * num_pieces / std::max<int64_t>(1, numel);
  for (size_t i = 0; i < passes.size(); ++i) {
    const Pass& pass = passes[i];
    sums_.assign(pieces_.size() * kMaxSums, 0.0);
    at::parallel_for(0, num_pieces, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
      pass.on_cpu(&pieces_[begin], end - begin, options, &sums_[begin * kMaxSums]);
    });
    if (i + 1 < passes.size() || keeps_sums) add_up(jobs);
  }
}

// In the order of the pieces, whichever threads had them.
void Passes::add_up(std::vector<Job>* jobs) {
  size_t piece = 0;
  for (Job& job : *jobs) {
    std::fill_n(job.sums, kMaxSums, 0.0);
    for (; piece < pieces_.size() && pieces_[piece].job == &job; ++piece) {
      for (int k = 0; k < kMaxSums; ++k) job.sums[k] += sums_[piece * kMaxSums + k];
    }
  }
}

}  // namespace gpumode::optim
