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
    monitored_barrier,
    reconfigure,
    set_as_default,
)
from torch_gpumode.distributed._rebuild import rebuild
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
    "PeerLost",
    "Straggler",
    "WorldTooSmall",
    "abort",
    "flight_record",
    "get_reconfigure_handle",
    "monitored_barrier",
    "rebuild",
    "reconfigure",
    "set_as_default",
    "stragglers",
]
