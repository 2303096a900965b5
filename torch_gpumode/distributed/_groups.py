"""Functions on groups that torch.distributed lacks, or has from 2.14 on for one backend only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed import _backend

_being_rebuilt: WeakSet[dist.ProcessGroup] = WeakSet()
_being_rebuilt_lock = threading.Lock()


def abort(group: dist.ProcessGroup | None = None) -> None:
    """Ends every op in flight on the group, on all of its ranks, and closes it until a rebuild.

    The ops, and later ones, raise `CollectiveAborted` where they are waited for. Returns at once,
    may be called from any thread, and does nothing to a group that has failed already.

    Args:
        group: one group; None for the default group and all others of this process.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    for pg in [group] if group is not None else list(distributed_c10d._world.pg_map):
        for backend in [backend_of(pg)] if group is not None else _backends(pg):
            backend.abort()
        forget_coalescing(pg)


def get_reconfigure_handle(group: dist.ProcessGroup | None = None) -> str:
    """Returns what the other ranks need to reach this one: its part of `handles` of `reconfigure`.

    It stays the same until the group is destroyed.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    return backend_of(group).handle()


def reconfigure(
    uuid: int,
    handles: Sequence[str] | AbstractSet[str],
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Gives the group new members, and opens it. Called by every rank of the new membership.

    The group stays the same object: its rank() and size() change, DDP and user code go on with it.
    What is in flight is aborted first.

    Global ranks: in torch a global rank *is* the rank in the default group. So when the default
    group is reconfigured, the survivors' global ranks become their new ranks in it, and what torch
    remembers of other groups' members (`get_global_rank`, `get_process_group_ranks`,
    `broadcast(src=...)`) is translated to the new global ranks, without those that are gone. Other
    groups that a lost rank was in stay closed until they are reconfigured themselves, in any order;
    only who joins a group anew must have joined the default group before, on all ranks. A
    DeviceMesh keeps the old global ranks and must be made again.

    Args:
        uuid: 0 or more; the same on all ranks and never used before on this group.
        handles: those of all members; a list gives the ranks by position, a set leaves their order
            to the handles, which sort as the ranks did when the groups were made.
        group: the default group if None.
        timeout: the group's own if None.

    Raises:
        ValueError: `uuid` is negative, this rank's handle is missing, one is there twice, or the
            group has no gpumode backend.
        RuntimeError: another thread rebuilds the group, or TORCH_DISTRIBUTED_DEBUG=DETAIL has put
            it behind one of torch's own that cannot be rebuilt.
        torch.distributed.DistBackendError: some member did not come within `timeout` or died
            (`PeerLost`, `CollectiveTimeout`); the group may be reconfigured again.
    """
    world = distributed_c10d._get_default_group()
    pg = group if group is not None else world
    backend = backend_of(pg)
    ordered = list(handles) if isinstance(handles, Sequence) else sorted(handles)
    before = {handle: rank for rank, handle in enumerate(backend.members())}
    if timeout is None:
        timeout = backend.options._timeout
    with rebuilding(pg):
        backend.rebuild(uuid, ordered, timeout)
        forget_coalescing(pg)
        # Those who are new here say who they are in the default group, where nobody new is known.
        announced = torch.full((len(ordered),), -1)
        if pg is not world:
            options = distributed_c10d.AllgatherOptions()
            options.timeout = timeout
            pg._allgather_base(announced, torch.tensor([world.rank()]), options).wait()
        remember_members(
            pg, [before.get(handle) for handle in ordered], joined_as=announced.tolist()
        )


def remember_members(
    pg: dist.ProcessGroup, origins: Sequence[int | None], joined_as: Sequence[int] | None = None
) -> None:
    """Tells torch's tables of a membership whose rank r was rank `origins[r]` in the tables.

    Where that is None the rank is new, with the global rank `joined_as[r]`, or -1.
    """
    tables = distributed_c10d._world.pg_group_ranks
    known: dict[int | None, int] = {rank: each for each, rank in tables[pg].items()}
    if joined_as is None:
        joined_as = [-1] * len(origins)
    global_ranks = [known.get(origin, joined_as[rank]) for rank, origin in enumerate(origins)]
    if pg is not distributed_c10d._get_default_group():
        tables[pg] = {each: rank for rank, each in enumerate(global_ranks) if each >= 0}
        return
    renumbered = {old: new for new, old in enumerate(global_ranks) if old >= 0}
    for other, ranks in tables.items():
        tables[other] = {
            renumbered[global_rank]: rank
            for global_rank, rank in ranks.items()
            if global_rank in renumbered
        }
    tables[pg] = {rank: rank for rank in range(len(global_ranks))}


def set_as_default(device: str) -> None:
    """Makes gpumode what `init_process_group` without a backend uses for a device type.

    TorchTitan and DTensor's tests ask torch for the default backend of a device.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ValueError: another device.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda", got {device!r}')
    dist.Backend.default_device_backend_map[device] = "gpumode"


@contextmanager
def rebuilding(pg: dist.ProcessGroup) -> Iterator[None]:
    """Refuses groups that cannot be rebuilt, or not now."""
    if any(hasattr(pg._get_backend(device), "wrapped_pg") for device in pg._device_types):
        raise RuntimeError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group in one that cannot be rebuilt; use "
            "INFO: gpumode compares the calls of all ranks by itself"
        )
    with _being_rebuilt_lock:
        if pg in _being_rebuilt:  # two threads would both speak for this rank
            raise RuntimeError(
                f"{pg.group_name} is being rebuilt by another thread of this process"
            )
        _being_rebuilt.add(pg)
    try:
        yield
    finally:
        with _being_rebuilt_lock:
            _being_rebuilt.discard(pg)


def forget_coalescing(pg: dist.ProcessGroup) -> None:
    """Ends what an exception in a coalescing block has left: torch would add to it for ever."""
    distributed_c10d._world.pg_coalesce_state.pop(pg, None)


def backend_of(group: dist.ProcessGroup | None) -> Any:
    """Returns the gpumode backend of a group, of the default group for None."""
    pg = group if group is not None else distributed_c10d._get_default_group()
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError(f"group: expected a group that this rank is in, or None, got {pg!r}")
    backends = _backends(pg)
    if not backends:
        raise ValueError(f"group: {dist.get_backend(pg)} has no gpumode backend")
    return backends[0]


def _backends(pg: dist.ProcessGroup) -> list[Any]:
    """Returns the gpumode backends of a group: one serves all devices, so one or none."""
    found = []
    for device in pg._device_types:
        backend = pg._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _backend.C.Backend) and backend not in found:
            found.append(backend)
    return found
