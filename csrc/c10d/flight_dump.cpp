#include "c10d/flight_dump.h"

#include <torch/csrc/distributed/c10d/TraceUtils.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "c10d/fork.h"
#include "core/os/thread.h"

namespace gpumode {
namespace {

// The analyser takes ops for coalesced if the number of a transfer is that of a collective.
constexpr int64_t kFirstP2PInNccl = 1'000'000'000;

using ::c10d::new_dict;
using ::c10d::new_list;
using Dict = c10::Dict<c10::IValue, c10::IValue>;
using List = c10::List<c10::IValue>;
using Shapes = std::vector<std::vector<int64_t>>;

// The version of the format: that of torch 2.11 to 2.14.
constexpr const char* kFormatVersion = "2.10";

// NCCL's words

const std::map<std::string, std::string>& nccl_names() {
  // Never destroyed: a dump may be written until the last instant.
  static const auto& names = *new std::map<std::string, std::string>{
      {"all_gather_into_tensor", "_all_gather_base"},
      {"reduce_scatter_tensor", "_reduce_scatter_base"},
      {"all_reduce_coalesced", "allreduce_coalesced"},
      {"all_gather_coalesced", "ALLGATHER_coalesced"},
      {"all_to_all_single", "all_to_all"},
      {"gather_single", "gather"},
      {"barrier", "all_reduce_barrier"},
  };
  return names;
}

std::string name_of(const CallDescription& call, int rank, Vocabulary words) {
  const std::string title = call.title;
  if (words == Vocabulary::Ours) {
    return title;
  }
  auto name = title.substr(title.find(':') + 1);
  if (name == "send") {
    return "nccl:send " + std::to_string(rank) + "->" + std::to_string(call.peer);
  }
  if (name.rfind("recv", 0) == 0) {
    return "nccl:recv " + std::to_string(rank) + "<-" + std::to_string(std::max(call.peer, 0));
  }
  const auto known = nccl_names().find(name);
  return "nccl:" + (known != nccl_names().end() ? known->second : name);
}

// NCCL's record has a list of tensors as one tensor.
Shapes joined(const Shapes& shapes) {
  if (shapes.size() < 2) {
    return shapes;
  }
  if (std::any_of(shapes.begin(), shapes.end(),
                  [&](const auto& shape) { return shape != shapes[0]; })) {
    int64_t numel = 0;
    for (const auto& shape : shapes) {
      numel += std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    }
    return {{numel}};
  }
  auto shape = shapes[0];
  shape.insert(shape.begin(), static_cast<int64_t>(shapes.size()));
  return {std::move(shape)};
}

List to_list(const Shapes& shapes) {
  auto list = new_list();
  for (const auto& shape : shapes) {
    auto sizes = new_list();
    for (const auto size : shape) {
      sizes.push_back(size);
    }
    list.push_back(std::move(sizes));
  }
  return list;
}

std::vector<std::string> dtypes_of(const TensorsDescription& tensors) {
  std::vector<std::string> names;
  for (const auto dtype : tensors.dtypes) {
    names.emplace_back(c10::toString(dtype));
  }
  return names;
}

// The entries

int64_t wall_clock_ns(TimePoint time) {
  using std::chrono::system_clock;
  const auto ago = Clock::now() - time;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             (system_clock::now() - ago).time_since_epoch())
      .count();
}

double milliseconds(Duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// What the entries of one group have in common, and what an entry needs of the earlier ones.
struct Writer {
  const GroupFlightRecord& group;
  Vocabulary words;
  int64_t num_collectives = 0, num_p2p = 0;
  bool collective_runs = false;  // they run one after the other, so later ones have not started

  Dict entry(const FlightRecorder::Entry& entry, const CallDescription& call, bool is_end);
  void append(const FlightRecorder::Entry& entry, std::vector<std::pair<uint64_t, Dict>>* dicts);
};

Dict Writer::entry(const FlightRecorder::Entry& entry, const CallDescription& call, bool is_end) {
  const Op& op = *entry.op;
  const auto tag = op.tag();
  const bool done = op.done();
  const bool ok = done && op.status().ok();
  const bool waits = !ok && !tag.p2p() && collective_runs;
  auto dict = new_dict();
  dict.insert("record_id", static_cast<int64_t>(entry.id));
  dict.insert("pg_id", static_cast<int64_t>(group.id));
  dict.insert("process_group", std::make_tuple(group.name, group.desc));
  dict.insert("collective_seq_id", num_collectives);
  dict.insert("p2p_seq_id", num_p2p);
  dict.insert("op_id", static_cast<int64_t>(entry.id));
  dict.insert("is_p2p", tag.p2p());
  dict.insert("profiling_name", name_of(call, entry.rank, words));
  const auto shapes = [this](const TensorsDescription& tensors) {
    return to_list(words == Vocabulary::Nccl ? joined(tensors.shapes()) : tensors.shapes());
  };
  dict.insert("input_sizes", shapes(call.inputs));
  dict.insert("input_dtypes", dtypes_of(call.inputs));
  dict.insert("output_sizes", shapes(call.outputs));
  dict.insert("output_dtypes", dtypes_of(call.outputs));
  dict.insert("state", ok ? "completed" : waits ? "scheduled" : "started");
  dict.insert("retired", done);
  dict.insert("time_created_ns", wall_clock_ns(op.started_at()));
  dict.insert("time_discovered_started_ns",
              waits ? c10::IValue() : c10::IValue(wall_clock_ns(op.started_at())));
  dict.insert("time_discovered_completed_ns",
              ok ? c10::IValue(wall_clock_ns(op.finished_at())) : c10::IValue());
  if (ok) {
    dict.insert("duration_ms", milliseconds(op.finished_at() - op.started_at()));
  }
  dict.insert("timeout_ms", static_cast<int64_t>(milliseconds(op.timeout())));
  dict.insert("frames", new_list());

  dict.insert("epoch", static_cast<int64_t>(tag.epoch));
  dict.insert("attempt", static_cast<int64_t>(tag.attempt));
  dict.insert("error", done && !ok ? c10::IValue(op.status().str()) : c10::IValue());
  if (done && is_end && op.straggler().rank >= 0) {
    dict.insert("straggler", static_cast<int64_t>(op.straggler().rank));
    dict.insert("waited_ms", milliseconds(op.straggler().waited));
  }
  return dict;
}

// A coalesced op is its calls and an end; in NCCL's words too.
void Writer::append(const FlightRecorder::Entry& entry,
                    std::vector<std::pair<uint64_t, Dict>>* dicts) {
  const auto tag = entry.op->tag();
  const auto number = static_cast<int64_t>(tag.seq & ~Tag::kPointToPoint);
  if (tag.p2p()) {
    num_p2p = number + (words == Vocabulary::Nccl ? kFirstP2PInNccl : 0);
  } else {
    num_collectives = number;
  }
  for (const auto& call : entry.calls) {
    const bool is_end = entry.calls.size() == 1;
    if (words == Vocabulary::Nccl && call.title == std::string("gpumode:all_reduce_sparse")) {
      CallDescription known;  // its sizes differ between ranks, which the analyser would report
      known.title = "gpumode:barrier";
      dicts->emplace_back(entry.id, this->entry(entry, known, is_end));
      continue;
    }
    dicts->emplace_back(entry.id, this->entry(entry, call, is_end));
  }
  if (entry.calls.size() > 1) {
    CallDescription end;
    end.title = "gpumode:coalesced";
    dicts->emplace_back(entry.id, this->entry(entry, end, true));
  }
  const bool completed = entry.op->done() && entry.op->status().ok();
  collective_runs = collective_runs || (!tag.p2p() && !completed);
}

std::string ranks_of(const GroupFlightRecord& group) {
  std::string text = "[";
  for (const auto rank : group.global_ranks) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(rank);
  }
  return text + "]";
}

}  // namespace

std::string pickle_flight_records(const std::vector<GroupFlightRecord>& groups, Vocabulary words) {
  std::vector<std::pair<uint64_t, Dict>> dicts;
  auto config = new_dict();
  auto status = new_dict();
  for (const auto& group : groups) {
    Writer writer{group, words};
    for (const auto& entry : group.entries) {
      writer.append(entry, &dicts);
    }
    auto about = new_dict();
    about.insert("name", group.name);
    about.insert("desc", group.desc);
    about.insert("ranks", ranks_of(group));
    config.insert(group.name, about);
    auto state = new_dict();
    state.insert("rank", static_cast<int64_t>(group.rank));
    state.insert("failure", group.failure.ok() ? c10::IValue() : c10::IValue(group.failure.str()));
    status.insert(static_cast<int64_t>(group.id), state);
  }
  std::stable_sort(dicts.begin(), dicts.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  auto entries = new_list();
  for (auto& [id, dict] : dicts) {
    entries.push_back(std::move(dict));
  }
  auto record = new_dict();
  record.insert("version", kFormatVersion);
  record.insert("entries", std::move(entries));
  record.insert("pg_config", std::move(config));
  record.insert("pg_status", std::move(status));
  return ::c10d::pickle_str(record);
}

// Files

namespace {

constexpr size_t kMaxDumped = 20'000;

std::filesystem::path dump_path(int64_t global_rank) {
  const auto name = "gpumode_rank_" + std::to_string(global_rank);
  for (const auto* variable : {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}) {
    if (const auto* prefix = std::getenv(variable)) {
      return prefix + name;
    }
  }
  if (const auto* cache = std::getenv("XDG_CACHE_HOME")) {
    return std::filesystem::path(cache) / "torch" / name;
  }
  const auto* home = std::getenv("HOME");
  return std::filesystem::path(home != nullptr ? home : "/tmp") / ".cache" / "torch" / name;
}

// The last ops only, so that a dump takes no longer than the end of the process waits for it.
void limit(std::vector<GroupFlightRecord>* groups) {
  std::vector<uint64_t> ids;
  for (const auto& group : *groups) {
    for (const auto& entry : group.entries) {
      ids.push_back(entry.id);
    }
  }
  if (ids.size() <= kMaxDumped) {
    return;
  }
  const auto first = ids.end() - static_cast<std::ptrdiff_t>(kMaxDumped);
  std::nth_element(ids.begin(), first, ids.end());
  for (auto& group : *groups) {
    auto& entries = group.entries;
    entries.erase(std::remove_if(entries.begin(), entries.end(),
                                 [&](const auto& entry) { return entry.id < *first; }),
                  entries.end());
  }
}

// What this process calls itself: its rank in the default group, the newest if there were several.
int64_t global_rank(const std::vector<GroupFlightRecord>& groups) {
  const auto newest =
      std::max_element(groups.begin(), groups.end(), [](const auto& a, const auto& b) {
        return std::make_pair(a.desc == "default_pg", a.id) <
               std::make_pair(b.desc == "default_pg", b.id);
      });
  const auto rank = static_cast<size_t>(newest->rank);
  return rank < newest->global_ranks.size() ? static_cast<int64_t>(newest->global_ranks[rank]) : -1;
}

void write_dump(std::vector<GroupFlightRecord> groups) {
  limit(&groups);
  groups.erase(std::remove_if(groups.begin(), groups.end(),
                              [](const auto& group) { return group.entries.empty(); }),
               groups.end());
  const auto rank = groups.empty() ? -1 : global_rank(groups);
  if (rank < 0) {
    return;
  }
  const auto path = dump_path(rank);
  try {
    if (path.has_parent_path()) {
      std::filesystem::create_directories(path.parent_path());
    }
    auto unfinished = path;  // a reader never sees half of it
    unfinished += ".part";
    const auto bytes = pickle_flight_records(groups, Vocabulary::Nccl);
    std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
    file.exceptions(std::ios::badbit | std::ios::failbit);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    std::filesystem::rename(unfinished, path);
    LOG(INFO) << "torch_gpumode: wrote the flight record to " << path.string();
  } catch (const std::exception& error) {
    LOG(WARNING) << "torch_gpumode: cannot write the flight record to " << path.string() << ": "
                 << error.what();
  }
}

struct Dumper {
  std::mutex mutex;  // guards what follows
  std::condition_variable cv;
  std::function<std::vector<GroupFlightRecord>()> wanted;
  bool running = false;

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (wanted) {
      const auto collect = std::exchange(wanted, nullptr);
      lock.unlock();
      write_dump(collect());
      lock.lock();
    }
    running = false;
    cv.notify_all();
  }
};

Dumper& dumper() {
  static auto* instance = [] {
    auto* made = new Dumper;  // used during exit
    survive_fork(made->mutex, [made] {
      made->wanted = nullptr;
      made->running = false;
    });
    return made;
  }();
  return *instance;
}

}  // namespace

void dump_flight_records_soon(std::function<std::vector<GroupFlightRecord>()> collect) {
  auto& state = dumper();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.wanted = std::move(collect);
  if (!state.running) {
    try {
      os::start_thread("gpumode_dump", [&state] { state.run(); }).detach();
      state.running = true;
    } catch (const std::system_error& error) {
      LOG(WARNING) << "torch_gpumode: no flight record, cannot start a thread: " << error.what();
    }
  }
}

void wait_for_flight_dumps(std::chrono::milliseconds patience) {
  auto& state = dumper();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.cv.wait_for(lock, patience, [&] { return !state.running; });
}

}  // namespace gpumode
