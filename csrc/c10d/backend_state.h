#pragma once

#include <condition_variable>
#include <map>
#include <utility>

#include "c10d/backend.h"
#include "c10d/futures.h"

// What a backend shares with the callbacks of its ops, which may outlive it.
namespace gpumode {

// Keeps the memory of an op's tensors until the op is done. It holds storages, since a tensor's
// last reference may need the GIL to go, and this one is dropped on a communicator's thread.
struct Backend::Keepalive {
  explicit Keepalive(const Call& call) {
    storages.reserve(call.inputs.size() + call.outputs.size());
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) {
        storages.push_back(tensor.storage());
      }
    }
  }

  ~Keepalive() {
    for (const auto& storage : storages) {
      if (storage.use_count() == 1) {  // rare: the caller has dropped the tensor already
        run_on_future_thread([dropped = std::move(storages)]() mutable { dropped.clear(); });
        return;
      }
    }
  }

  Keepalive(const Keepalive&) = delete;
  Keepalive& operator=(const Keepalive&) = delete;

  std::vector<c10::Storage> storages;
};

struct Backend::Hooks {
  std::atomic<bool> any{false};  // read without the lock: most groups have no hook
  std::mutex mutex;              // guards what follows
  std::condition_variable cv;
  std::function<void(std::shared_ptr<::c10d::WorkInfo>)> on_completion;
  std::map<int64_t, std::function<void()>> on_abort;
  std::mutex running;           // held while one of them runs
  bool abort_reported = false;  // since the last rebuild
  int num_pending = 0;          // ops whose completion hook has not run

  void report_abort() {
    std::map<int64_t, std::function<void()>> hooks;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (std::exchange(abort_reported, true)) {
        return;
      }
      hooks = on_abort;
    }
    for (const auto& [id, hook] : hooks) {
      hook();
    }
  }
};

}  // namespace gpumode
