#include "c10d/engine_choice.h"

#include "c10d/exceptions.h"
#include "host/endpoint.h"
#include "host/host_engine.h"

namespace gpumode {

std::unique_ptr<Engine> choose_engine(int rank, Duration spin) {
  host::EngineOptions options;
  options.initial_rank = rank;
  options.spin = spin;
  Status status;
  auto engine = host::make_engine(options, &status);
  throw_if_failed(status);
  return engine;
}

Status check_handle(const std::string& handle) { return host::Endpoint::check(handle); }

}  // namespace gpumode
