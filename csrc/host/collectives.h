#pragma once

#include <memory>

#include "core/op.h"
#include "host/task.h"

namespace gpumode::host {

// One file each. They say which bytes go where; Exchange and TwoPhase move them.
std::unique_ptr<Task> make_all_gather(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_all_reduce(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_all_to_all(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_barrier(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_broadcast(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_gather(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_reduce(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_reduce_scatter(const Context& context, const OpDesc& op);
std::unique_ptr<Task> make_scatter(const Context& context, const OpDesc& op);

// Picks among the above.
std::unique_ptr<Task> make_collective(const Context& context, const OpDesc& op);

}  // namespace gpumode::host
