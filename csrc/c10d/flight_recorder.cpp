#include "c10d/flight_recorder.h"

#include <atomic>
#include <utility>

namespace gpumode {

TensorsDescription::TensorsDescription(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.dim());
    sizes.append(tensor.sizes().begin(), tensor.sizes().end());
    dtypes.push_back(tensor.scalar_type());
  }
}

std::vector<std::vector<int64_t>> TensorsDescription::shapes() const {
  std::vector<std::vector<int64_t>> result;
  for (auto it = sizes.begin(); it != sizes.end();) {
    const auto num_dims = *it++;
    result.emplace_back(it, it + num_dims);
    it += num_dims;
  }
  return result;
}

void FlightRecorder::record(std::shared_ptr<const Op> op, int rank,
                            c10::SmallVector<CallDescription, 1> calls) {
  if (!enabled()) {
    return;
  }
  static std::atomic<uint64_t> next_id{0};
  Entry entry{next_id++, rank, std::move(op), std::move(calls)};
  std::lock_guard<std::mutex> lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(entry));
  } else {
    std::swap(ring_[num_recorded_ % capacity_], entry);
  }
  ++num_recorded_;
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> result;
  result.reserve(ring_.size());
  const auto oldest = num_recorded_ - ring_.size();
  for (auto i = oldest; i < num_recorded_; ++i) {
    result.push_back(ring_[i % capacity_]);
  }
  return result;
}

}  // namespace gpumode
