"""The survivors of a group agree who is left, and go on.

Each membership of a group has a number, its uuid. Who comes after it is decided in the group's
store, under keys that carry this uuid:

    1. every survivor posts its handle under its rank;
    2. a survivor that sees the handles of all ranks that it does not know to be dead, or has waited
       for them long enough, proposes all that are there as the next membership. The store's
       compare-and-set takes the first proposal, whoever made it: no two survivors ever read
       different ones;
    3. the members of the decision build the group. If one of them dies on the way, they start
       again at 1 with the decided membership as the one to succeed, whether it was built or not.

A rank that the decision leaves out, a frozen one that thaws say, finds the decision and raises
WorldTooSmall. The store has to live: with torchrun it lives in the agent, otherwise in rank 0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed._backend import C
from torch_gpumode.distributed._groups import (
    backend_of,
    checked_timeout,
    rebuilding,
    remember_members,
)
from torch_gpumode.distributed.exceptions import CollectiveTimeout, PeerLost, WorldTooSmall

_logger = logging.getLogger(__name__)

# How long a survivor waits for the decision before it looks again who is there: at first, and at
# most. Most often the last to come decides at once.
_LOOK_AGAIN_S = 0.005, 0.05
# The part of the time left for which ranks are waited for that may be frozen.
_PATIENCE = 1 / 3
# How much longer than the deadline the store may take to answer.
_GRACE = timedelta(seconds=0.5)


@dataclass(frozen=True)
class _Membership:
    """One membership of a group, and this rank's place in it."""

    uuid: int
    rank: int
    handles: list[str]  # by rank: what reaches the member

    @property
    def size(self) -> int:
        return len(self.handles)


# What was decided last, where it could not be built: by group, with the uuid of the last that was.
_decided: WeakKeyDictionary[dist.ProcessGroup, tuple[int, _Membership]] = WeakKeyDictionary()


def rebuild(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    min_size: int = 1,
) -> None:
    """Rebuilds a group with the ranks that are left. Called by each of them after a failure.

    The group stays the same object, with new ranks in the old order; see `reconfigure` for what
    that means for global ranks and other groups. A group that has not failed is aborted, so that
    the others come too. Ranks that are known to be dead are not waited for; others, such as a
    frozen one, are for a third of `timeout`.

    Args:
        group: the default group if None.
        timeout: bounds the whole of it; the group's own if None.
        min_size: the smallest world to go on with.

    Raises:
        WorldTooSmall: fewer than `min_size` ranks are left, or they went on without this one.
        CollectiveTimeout: there was no agreement within `timeout`, or the store did not answer.
        torch.distributed.DistStoreError, torch.distributed.DistNetworkError: the store is gone.
        ValueError: `min_size` or `timeout` is not positive, or the group has no gpumode backend.
        RuntimeError: another thread rebuilds the group, or TORCH_DISTRIBUTED_DEBUG=DETAIL has put
            it behind one of torch's own that cannot be rebuilt.
    """
    if min_size < 1:
        raise ValueError(f"min_size: expected 1 or more, got {min_size}")
    pg = group if group is not None else distributed_c10d._get_default_group()
    backend = backend_of(pg)
    timeout = checked_timeout(timeout, backend)
    with rebuilding(pg, backend):
        _rebuild(pg, backend, timeout, min_size)


def _rebuild(pg: dist.ProcessGroup, backend: Any, timeout: timedelta, min_size: int) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    store = C.BoundedStore(distributed_c10d._world.pg_map[pg][1], timeout + _GRACE)
    if backend.failure() is None:
        backend.abort_because(f"rank {backend.rank()} rebuilds the group")
    began, rank, size = time.monotonic(), backend.rank(), backend.size()
    current = _Membership(backend.uuid(), backend.rank(), backend.members())
    base, later = _decided.get(pg, (current.uuid, current))
    if base == current.uuid:
        current = later
    failed: dist.DistBackendError | None = None  # why `current` could not be built
    while True:
        try:
            current = _agree(store, backend, current, failed, deadline)
        except CollectiveTimeout as error:
            raise error from failed
        _decided[pg] = backend.uuid(), current
        if current.size < min_size:
            raise WorldTooSmall(f"{current.size} ranks are left, and min_size is {min_size}")
        # The attempt may take half of what is left, so that there can be another.
        attempt_s = max((deadline - time.monotonic()) / 2, 0.001)
        try:
            backend.rebuild(current.uuid, current.handles, timedelta(seconds=attempt_s))
        except dist.DistBackendError as error:
            _logger.warning("rebuilding %s failed, agreeing again: %s", pg.group_name, error)
            failed = error
            if time.monotonic() >= deadline:
                raise
        else:
            remember_members(pg, current.handles)
            _logger.info(
                "rebuilt %s in %.1f ms: rank %d of %d, which was rank %d of %d",
                *(pg.group_name, (time.monotonic() - began) * 1e3),
                *(current.rank, current.size, rank, size),
            )
            return


def _agree(
    store: Any,
    backend: Any,
    current: _Membership,
    failed: dist.DistBackendError | None,
    deadline: float,
) -> _Membership:
    """Returns the membership after `current`, the same on all ranks."""
    prefix = f"gpumode/after/{current.uuid}"
    decision_key = f"{prefix}/members"

    def handle_key(rank: int) -> str:
        return f"{prefix}/handle/{rank}"

    store.set(handle_key(current.rank), backend.handle())
    now = time.monotonic()
    impatient = now + (deadline - now) * _PATIENCE
    look_again_s = _LOOK_AGAIN_S[0]
    dead = set(failed.ranks) if isinstance(failed, PeerLost) else set()
    num_looks = 0
    while not store.check([decision_key]):
        here = [rank for rank in range(current.size) if store.check([handle_key(rank)])]
        num_looks += 1
        dead |= _newly_dead(backend, current, set(here) | dead, num_looks)
        awaited = set(range(current.size)) - set(here) - dead
        now = time.monotonic()
        if now >= deadline:
            why = f"; the last attempt: {failed}" if failed else ""
            raise CollectiveTimeout(
                f"the time was up before ranks {here} of {current.size}, which came, went on{why}"
            )
        if not awaited or now >= impatient:
            store.compare_set(decision_key, "", json.dumps(here))
        else:
            _wait(store, decision_key, look_again_s)
            look_again_s = min(2 * look_again_s, _LOOK_AGAIN_S[1])
    members = json.loads(store.multi_get([decision_key])[0])
    if current.rank not in members:
        raise WorldTooSmall(
            f"ranks {members} of {current.size} went on without rank {current.rank}, which they "
            f"had waited for"
        )
    digest = hashlib.sha256(f"{current.uuid} {members}".encode()).digest()
    uuid = int.from_bytes(digest[:8], "big") >> 1
    handles = [each.decode() for each in store.multi_get([handle_key(rank) for rank in members])]
    return _Membership(uuid, members.index(current.rank), handles)


def _newly_dead(backend: Any, current: _Membership, known: set[int], num_looks: int) -> set[int]:
    """Returns ranks of `current` outside of `known` that will not come any more."""
    if current.uuid == backend.uuid():
        return set(backend.dead_ranks()) - known
    # It was never built, so nobody watches its members: knock at their doors, ever more rarely.
    if num_looks & (num_looks - 1):
        return set()
    return {
        rank
        for rank, handle in enumerate(current.handles)
        if rank not in known and not C.reachable(handle)
    }


def _wait(store: Any, key: str, seconds: float) -> None:
    """Returns when the key is there or the time is up, at which Store.wait would warn on stderr."""
    for _ in range(5):
        if store.check([key]):
            return
        time.sleep(seconds / 5)
