"""Functions on groups that torch.distributed lacks, or has from 2.14 on for one backend only."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed import _backend

_LONGEST = timedelta(days=3650)

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
    if group is not None:
        backend_of(group).abort()
        return
    for each in list(distributed_c10d._world.pg_map):
        for backend in _backends(each):
            backend.abort()


def initial_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks that the members of a group had when it was made, by their ranks now.

    `initial_ranks()[dist.get_rank()]` is a name of this rank that stays when others are lost. The
    contributors of a retried op go by these names, and the tensors of `all_gather`'s list belong,
    in their order, to those that this returns before the call.

    Args:
        group: the default group if None.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    return backend_of(group).initial_ranks()


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that says on every rank which ranks did not come.

    For torch before 2.14, whose `torch.distributed.monitored_barrier` accepts groups of the name
    "gloo" only; the same from 2.14 on. It is a collective: a rank that calls another one instead is
    told so at once, as all others are (`CollectiveMismatch`). After a failure the group is closed.

    Args:
        group: the default group if None. A rank that is not in it returns at once.
        timeout: the group's own if None.
        wait_all_ranks: whether the text names all missing ranks instead of the first, and a lost
            rank does not end the barrier while others may still come. `ranks` of the exception
            always holds all that were missing then.

    Raises:
        CollectiveTimeout: some ranks did not come within `timeout`.
        PeerLost: some ranks are dead.
        ValueError: `timeout` is not positive, or the group has no gpumode backend.
    """
    pg: Any = group if group is not None else distributed_c10d._get_default_group()
    if pg is not dist.GroupMember.NON_GROUP_MEMBER:
        pg.monitored_barrier(checked_timeout(timeout, backend_of(pg)), wait_all_ranks)


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
        ValueError: `uuid` is negative, `timeout` not positive, this rank's handle missing, one of
            them there twice or no handle of this host, or the group has no gpumode backend.
        RuntimeError: another thread rebuilds the group, it has another backend, too, or
            TORCH_DISTRIBUTED_DEBUG=DETAIL has put it behind one of torch's own; these cannot be
            rebuilt.
        torch.distributed.DistBackendError: some member did not come within `timeout` or died
            (`PeerLost`, `CollectiveTimeout`); the group may be reconfigured again.
    """
    world = distributed_c10d._get_default_group()
    pg = group if group is not None else world
    backend = backend_of(pg)
    timeout = checked_timeout(timeout, backend)
    ordered = list(handles) if isinstance(handles, Sequence) else sorted(handles)
    with rebuilding(pg, backend):
        backend.rebuild(uuid, ordered, timeout)
        # Those who are new here say who they are in the default group, where nobody new is known.
        announced = torch.full((len(ordered),), -1)
        if pg is not world:
            options = distributed_c10d.AllgatherOptions()
            options.timeout = timeout
            pg._allgather_base(announced, torch.tensor([world.rank()]), options).wait()
        remember_members(pg, backend, announced.tolist())


class _RankTable(dict[int, int]):
    """What torch remembers of a group: the rank of each global rank.

    It carries the membership, and the handles of its members by rank, that it is right about. A
    group may have another one by now, if an exception came between rebuilding it and changing its
    table.
    """

    def __init__(self, ranks: Mapping[int, int], uuid: int, handles: list[str]) -> None:
        super().__init__(ranks)
        self.uuid, self.handles = uuid, handles


def remember_members(
    pg: dist.ProcessGroup, backend: Any, announced: Sequence[int] | None = None
) -> None:
    """Tells torch's tables who the members of a group are, by rank, if they have changed.

    Who was in the table keeps the global rank that it has there.

    Args:
        announced: the global rank of who was not; -1 if unknown.
    """
    tables = distributed_c10d._world.pg_group_ranks
    uuid = backend.uuid()
    before = tables.get(pg)
    if before is None:  # another thread has destroyed the group
        return
    assert isinstance(before, _RankTable), "make_rebuildable() has made it one"
    if before.uuid == uuid and announced is None:
        return
    handles = backend.members()
    rank_to_global = {rank: each for each, rank in before.items()}
    known = {handle: rank_to_global.get(rank, -1) for rank, handle in enumerate(before.handles)}
    global_ranks = [
        known.get(handle, announced[rank] if announced is not None else -1)
        for rank, handle in enumerate(handles)
    ]
    if pg is not distributed_c10d._get_default_group():
        ranks = {each: rank for rank, each in enumerate(global_ranks) if each >= 0}
        tables[pg] = _RankTable(ranks, uuid, handles)
        _tell_backends([pg])
        return
    renumbered = {old: new for new, old in enumerate(global_ranks) if old >= 0}
    changed: dict[Any, dict[int, int]] = {}
    for other, table in tables.items():
        ranks = {renumbered[old]: rank for old, rank in table.items() if old in renumbered}
        changed[other] = (
            _RankTable(ranks, table.uuid, table.handles) if isinstance(table, _RankTable) else ranks
        )
    changed[pg] = _RankTable({rank: rank for rank in range(len(handles))}, uuid, handles)
    tables.update(changed)  # at once: an exception from a signal handler may come anywhere
    _tell_backends(each for each in changed if isinstance(each, dist.ProcessGroup))


def _tell_backends(groups: Iterable[dist.ProcessGroup]) -> None:
    """Tells backends the global ranks of their members, for the flight record."""
    for pg in groups:
        rank_to_global = {
            rank: each for each, rank in distributed_c10d._world.pg_group_ranks[pg].items()
        }
        for backend in _backends(pg):
            if sorted(rank_to_global) == list(range(backend.size())):  # else not rebuilt yet
                backend.set_global_ranks([rank_to_global[rank] for rank in sorted(rank_to_global)])


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


def make_rebuildable(pg: dist.ProcessGroup, backend: Any) -> None:
    """Refuses groups that cannot be rebuilt; of others the table of ranks knows the members."""
    if any(hasattr(pg._get_backend(device), "wrapped_pg") for device in pg._device_types):
        raise RuntimeError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group in one that cannot be rebuilt; use "
            "INFO: gpumode compares the calls of all ranks by itself"
        )
    if any(not isinstance(each, _backend.C.Backend) for each in _all_backends(pg)):
        raise RuntimeError(
            f"the group is {dist.get_backend_config(pg)}, and only gpumode can be rebuilt: make a "
            "new group, or next time one group for each backend"
        )
    tables = distributed_c10d._world.pg_group_ranks
    if not isinstance(tables[pg], _RankTable):
        tables[pg] = _RankTable(tables[pg], backend.uuid(), backend.members())


@contextmanager
def rebuilding(pg: dist.ProcessGroup, backend: Any) -> Iterator[None]:
    """Refuses groups that cannot be rebuilt, or not now, and cleans up after a failure."""
    make_rebuildable(pg, backend)
    with _being_rebuilt_lock:
        if pg in _being_rebuilt:  # two threads would both speak for this rank
            raise RuntimeError(
                f"{pg.group_name} is being rebuilt by another thread of this process"
            )
        _being_rebuilt.add(pg)
    try:
        # torch ends no coalescing block that an exception has left, and would put all later
        # collectives into it. A block of another thread may be alive, though.
        if not backend.coalesces_elsewhere():
            distributed_c10d._world.pg_coalesce_state.pop(pg, None)
        yield
    finally:
        with _being_rebuilt_lock:
            _being_rebuilt.discard(pg)


def checked_timeout(timeout: timedelta | None, backend: Any) -> timedelta:
    """Returns the timeout of a call, or the group's for None. C++ cannot count very long ones."""
    if timeout is None:
        return backend.options._timeout
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout: expected a timedelta, got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout: expected a positive one, got {timeout}")
    return min(timeout, _LONGEST)


def backend_of(group: dist.ProcessGroup | None) -> Any:
    """Returns the gpumode backend of a group, of the default group for None."""
    pg = group if group is not None else distributed_c10d._get_default_group()
    if not isinstance(pg, dist.ProcessGroup):
        raise ValueError(f"group: expected a group that this rank is in, or None, got {pg!r}")
    if pg not in distributed_c10d._world.pg_map:
        raise ValueError("group: it has been destroyed")
    backends = _backends(pg)
    if not backends:
        raise ValueError(f"group: {dist.get_backend(pg)} has no gpumode backend")
    return backends[0]


def _backends(pg: dist.ProcessGroup) -> list[Any]:
    """Returns the gpumode backends of a group: one serves all devices, so one or none."""
    found = []
    for backend in _all_backends(pg):
        if isinstance(backend, _backend.C.Backend) and backend not in found:
            found.append(backend)
    return found


def _all_backends(pg: dist.ProcessGroup) -> Iterator[Any]:
    for device in pg._device_types:
        backend = pg._get_backend(device)
        yield getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
