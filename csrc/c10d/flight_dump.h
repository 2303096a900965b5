#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "c10d/flight_recorder.h"

namespace gpumode {

// The flight record of one group, and who is in the group.
struct GroupFlightRecord {
  uint64_t id = 0;  // within the process
  std::string name, desc;
  int rank = -1;
  std::vector<uint64_t> global_ranks;  // of the members, by rank
  Status failure;
  std::vector<FlightRecorder::Entry> entries;
};

// The words in which ops are named: ours, or those of NCCL, the only ones that torch's
// flight-recorder analyser takes.
enum class Vocabulary { Ours, Nccl };

// All groups in the format of torch's flight recorder, pickled: its keys, and some more that it
// does not have: "epoch", "attempt", "error", "straggler" and "waited_ms" of each entry.
std::string pickle_flight_records(const std::vector<GroupFlightRecord>& groups, Vocabulary words);

// Writes them, soon and on a thread of its own, to where torch's flight recorder would:
// <prefix>gpumode_rank_<global rank>, where the prefix is $TORCH_FR_DUMP_TEMP_FILE, else torch's
// directory in the user's cache. `collect` is called on that thread.
void dump_flight_records_soon(std::function<std::vector<GroupFlightRecord>()> collect);
// Returns when nothing is being written, at most after `patience`.
void wait_for_flight_dumps(std::chrono::milliseconds patience);

}  // namespace gpumode
