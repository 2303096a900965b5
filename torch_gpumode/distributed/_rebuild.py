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
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed._backend import C
from torch_gpumode.distributed._groups import (
    backend_of,
    forget_coalescing,
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
_GRACE_S = 0.5

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Membership:
    """One membership of a group, and this rank's place in it."""

    uuid: int
    rank: int
    # By rank: the rank in the membership that torch's tables know, which is the last one built.
    origins: list[int]
    # By rank: what reaches the member.
    handles: list[str]

    @property
    def size(self) -> int:
        return len(self.origins)


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
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"timeout: expected a positive one, got {timeout}")
    pg = group if group is not None else distributed_c10d._get_default_group()
    backend = backend_of(pg)
    if timeout is None:
        timeout = backend.options._timeout
    with rebuilding(pg):
        _rebuild(pg, backend, time.monotonic() + timeout.total_seconds(), min_size)


def _rebuild(pg: dist.ProcessGroup, backend: Any, deadline: float, min_size: int) -> None:
    store = distributed_c10d._world.pg_map[pg][1]
    if backend.failure() is None:
        backend.abort()
    origins = list(range(backend.size()))
    current = _Membership(backend.uuid(), backend.rank(), origins, backend.members())
    base, later = _decided.get(pg, (current.uuid, current))
    if base == current.uuid:
        current = later
    lost: list[int] = []  # of `current`, as its attempt has found
    while True:
        current = _within(deadline, partial(_agree, store, backend, current, lost, deadline))
        _decided[pg] = backend.uuid(), current
        if current.size < min_size:
            raise WorldTooSmall(f"{current.size} ranks are left, and min_size is {min_size}")
        # The attempt may take half of what is left, so that there can be another.
        attempt_s = max((deadline - time.monotonic()) / 2, 0.001)
        try:
            backend.rebuild(current.uuid, current.handles, timedelta(seconds=attempt_s))
        except dist.DistBackendError as error:
            _logger.warning("rebuilding %s failed, agreeing again: %s", pg.group_name, error)
            if time.monotonic() >= deadline:
                raise
            lost = error.ranks if isinstance(error, PeerLost) else []
        else:
            forget_coalescing(pg)
            remember_members(pg, current.origins)
            return


def _within(deadline: float, call: Callable[[], _T]) -> _T:
    """Returns what `call` does, on a thread that is left behind if it does not return in time.

    torch's stores wait without a bound for a server that is frozen, or whose network is gone.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # it is the caller's
            outcome.set_exception(error)

    threading.Thread(target=run, name="gpumode-agree", daemon=True).start()
    timeout_s = max(deadline - time.monotonic(), 0) + _GRACE_S
    try:
        return outcome.result(min(timeout_s, threading.TIMEOUT_MAX))
    except TimeoutError:
        if outcome.done():
            raise
        raise CollectiveTimeout("the store does not answer") from None


def _agree(
    store: dist.Store, backend: Any, current: _Membership, lost: list[int], deadline: float
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
    dead = set(lost)
    num_looks = 0
    while not store.check([decision_key]):
        here = [rank for rank in range(current.size) if store.check([handle_key(rank)])]
        num_looks += 1
        dead |= _newly_dead(backend, current, set(here) | dead, num_looks)
        awaited = set(range(current.size)) - set(here) - dead
        now = time.monotonic()
        if now >= deadline:
            raise CollectiveTimeout(
                f"no agreement on the next membership; ranks {here} of {current.size} had come"
            )
        if not awaited or now >= impatient:
            store.compare_set(decision_key, "", json.dumps(here))
        else:
            _wait(store, decision_key, look_again_s)
            look_again_s = min(2 * look_again_s, _LOOK_AGAIN_S[1])
    members = json.loads(store.get(decision_key))
    if current.rank not in members:
        raise WorldTooSmall(
            f"ranks {members} of {current.size} went on without rank {current.rank}, which they "
            f"had waited for"
        )
    digest = hashlib.sha256(f"{current.uuid} {members}".encode()).digest()
    uuid = int.from_bytes(digest[:8], "big") >> 1
    handles = [each.decode() for each in store.multi_get([handle_key(rank) for rank in members])]
    origins = [current.origins[rank] for rank in members]
    return _Membership(uuid, members.index(current.rank), origins, handles)


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


def _wait(store: dist.Store, key: str, seconds: float) -> None:
    """Returns when the key is there or the time is up, at which Store.wait would warn on stderr."""
    for _ in range(5):
        if store.check([key]):
            return
        time.sleep(seconds / 5)
