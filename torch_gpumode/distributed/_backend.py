"""Makes the backend of a new group, for torch.distributed."""

from __future__ import annotations

import atexit
import copy
import inspect
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from torch_gpumode import _extension, config
from torch_gpumode.distributed import exceptions

C = _extension.load()

for _type in (
    exceptions.CollectiveAborted,
    exceptions.CollectiveTimeout,
    exceptions.PeerLost,
    exceptions.CollectiveMismatch,
    exceptions.WorldTooSmall,
    ValueError,
    DistBackendError,
):
    C.set_exception_type(_type.__name__, _type)

# For those who have just left C++, to take the GIL: some of Python's switch intervals of 5 ms.
_TIME_FOR_GIL_S = 0.02


def _leave() -> None:
    """Ends what is in flight and holds other threads off.

    A process may exit without destroy_process_group, and a thread that asks a finalising
    interpreter for the GIL from within C++ would abort it.
    """
    C.shutdown_all()
    if threading.active_count() > 1:
        time.sleep(_TIME_FOR_GIL_S)


atexit.register(_leave)


def create(dist_opts: Any, pg_options: Any) -> Any:
    """Returns a backend that is open, or on torch before 2.14 the process group around it, unless
    the group has another backend, too.

    Meets the other ranks in `dist_opts.store`, at most for `dist_opts.timeout`; not with world
    size 1, nor with `enable_reconfigure` (torch 2.14), which leaves it to `reconfigure`.

    Args:
        dist_opts: torch's _DistributedBackendOptions.
        pg_options: None, or `torch_gpumode._C.Options`, which are copied; their timeout is
            overridden by that of `dist_opts`.

    Raises:
        ValueError: `pg_options` is of another backend, or a TORCH_GPUMODE_* variable is wrong.
        torch.distributed.DistStoreError: some ranks, which it names, did not come in time, or the
            store is gone.
    """
    if pg_options is None:
        options = C.Options()
    elif isinstance(pg_options, C.Options):
        options = copy.deepcopy(pg_options)
    else:
        raise ValueError(
            f"pg_options: expected torch_gpumode._C.Options or None, got {type(pg_options)}"
        )
    settings = config.load()
    if settings.spin_us is not None:
        options.spin = timedelta(microseconds=settings.spin_us)
    if settings.flight_record is not None:
        options.flight_record = settings.flight_record
    options._timeout = dist_opts.timeout
    options.group_name = dist_opts.group_id
    options.global_ranks_in_group = dist_opts.global_ranks_in_group
    options.enable_reconfigure |= getattr(dist_opts, "enable_reconfigure", False)
    backend = C.Backend(dist_opts.store, dist_opts.group_rank, dist_opts.group_size, options)
    if not hasattr(C, "make_group"):
        return backend
    # torch replaces its group by ours, and drops what it was about to do with its own. It tells
    # creators neither the device nor the other backends.
    torchs = _locals_of("_new_process_group_helper")
    if len(set(torchs["backend_config"].get_device_backend_map().values())) > 1:
        torchs["pg"]._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        return backend
    group = C.make_group(dist_opts.store, backend)
    group.bound_device_id = torchs["device_id"]
    return group


def _locals_of(function: str) -> dict[str, Any]:
    """Returns the variables of the innermost caller of that name."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError(f"a gpumode group is made by torch.distributed, in its {function}")
    return frame.f_locals
