"""What torch.distributed has no name for: aborting a group, and going on without a lost rank.

try:
    loss.backward()
except torch.distributed.DistBackendError:
    torch_gpumode.distributed.rebuild()  # the survivors agree who is left, and go on
"""

from torch_gpumode.distributed._flight_record import Straggler, flight_record, stragglers
from torch_gpumode.distributed._groups import (
    abort,
    get_reconfigure_handle,
    initial_ranks,
    monitored_barrier,
    reconfigure,
    set_as_default,
)
from torch_gpumode.distributed._rebuild import rebuild
from torch_gpumode.distributed._retry import (
    Outcome,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from torch_gpumode.distributed.exceptions import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    WorldTooSmall,
)

__all__ = [
    "CollectiveAborted",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Outcome",
    "PeerLost",
    "Straggler",
    "WorldTooSmall",
    "abort",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "flight_record",
    "gather",
    "get_reconfigure_handle",
    "initial_ranks",
    "monitored_barrier",
    "rebuild",
    "reconfigure",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "set_as_default",
    "stragglers",
]
