"""Functions on groups that torch.distributed lacks, or has from 2.14 on for one backend only."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed import _backend


def abort(group: dist.ProcessGroup | None = None) -> None:
    """Ends every op in flight on the group, on all of its ranks, and closes it until a rebuild.

    The ops, and later ones, raise `CollectiveAborted` where they are waited for. Returns at once,
    may be called from any thread, and does nothing to a group that has failed already.

    Args:
        group: one group; None for the default group and all others of this process.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    if group is not None:
        backend_of(group).abort()
        return
    for each in list(distributed_c10d._world.pg_map):
        for backend in _backends(each):
            backend.abort()


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
    groups that a lost rank was in stay closed until they are reconfigured themselves, in any order.
    A DeviceMesh keeps the old global ranks and must be made again.

    Args:
        uuid: 0 or more; the same on all ranks and never used before on this group.
        handles: those of all members; a list gives the ranks by position, a set leaves their order
            to the handles, which sort as the ranks did when the groups were made.
        group: the default group if None.
        timeout: the group's own if None.

    Raises:
        ValueError: this rank's handle is missing, one is there twice, or the group has no gpumode
            backend.
        torch.distributed.DistBackendError: some member did not come within `timeout` or died
            (`PeerLost`, `CollectiveTimeout`); the group may be reconfigured again.
    """
    pg = group if group is not None else distributed_c10d._get_default_group()
    backend = backend_of(pg)
    is_world = pg is distributed_c10d._get_default_group()
    joining = backend.uuid() < 0  # and so was not in the world that the other groups know
    mine = -1 if is_world and joining else distributed_c10d._get_default_group().rank()
    ordered = list(handles) if isinstance(handles, Sequence) else sorted(handles)
    backend.rebuild(uuid, ordered, timeout if timeout is not None else backend.options._timeout)

    global_ranks = torch.empty(len(ordered), dtype=torch.int64)
    options = distributed_c10d.AllgatherOptions()
    if timeout is not None:
        options.timeout = timeout
    pg._allgather_base(global_ranks, torch.tensor([mine]), options).wait()
    _remember_ranks(pg, global_ranks.tolist(), is_world)


def remember_members(pg: dist.ProcessGroup, origins: list[int]) -> None:
    """Tells torch's tables of a membership whose rank r was rank `origins[r]` in the tables."""
    is_world = pg is distributed_c10d._get_default_group()
    global_ranks = {rank: each for each, rank in distributed_c10d._world.pg_group_ranks[pg].items()}
    _remember_ranks(pg, [global_ranks[rank] for rank in origins], is_world)


def _remember_ranks(pg: dist.ProcessGroup, global_ranks: list[int], is_world: bool) -> None:
    """Tells torch's tables who is who: `global_ranks` are those of `pg`'s members, before."""
    tables = distributed_c10d._world.pg_group_ranks
    if not is_world:
        tables[pg] = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}
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


def backend_of(group: dist.ProcessGroup | None) -> Any:
    """Returns the gpumode backend of a group, of the default group for None."""
    pg = group if group is not None else distributed_c10d._get_default_group()
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
