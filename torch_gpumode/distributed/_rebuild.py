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

from torch_gpumode.distributed._groups import backend_of, reconfigure
from torch_gpumode.distributed.exceptions import CollectiveTimeout, PeerLost, WorldTooSmall

_logger = logging.getLogger(__name__)

# How long a survivor waits for the decision before it looks again who is there: at first, and at
# most. Most often the last to come decides at once.
_LOOK_AGAIN_S = 0.005, 0.05


@dataclass(frozen=True)
class _Membership:
    """One membership of a group, and this rank's place in it."""

    uuid: int
    rank: int
    size: int


# What was decided last, where it could not be built: by group, with the uuid of the last that was.
_decided: WeakKeyDictionary[dist.ProcessGroup, tuple[int, _Membership]] = WeakKeyDictionary()


def rebuild(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    min_size: int = 1,
) -> None:
    """Rebuilds a group with the ranks that are left. Called by each of them after a failure.

    The group stays the same object, with new ranks in the old order; see `reconfigure` for what
    that means for global ranks and other groups. Ranks that are known to be dead are not waited
    for; others, such as a frozen one, are for half of `timeout`.

    Args:
        group: the default group if None.
        timeout: bounds the whole of it; the group's own if None.
        min_size: the smallest world to go on with.

    Raises:
        WorldTooSmall: fewer than `min_size` ranks are left, or they went on without this one.
        CollectiveTimeout: there was no agreement within `timeout`.
        torch.distributed.DistStoreError, torch.distributed.DistNetworkError: the store is gone.
        ValueError: `min_size` is not positive, or the group has no gpumode backend.
    """
    if min_size < 1:
        raise ValueError(f"min_size: expected 1 or more, got {min_size}")
    pg = group if group is not None else distributed_c10d._get_default_group()
    backend = backend_of(pg)
    timeout_s = (timeout if timeout is not None else backend.options._timeout).total_seconds()
    deadline = time.monotonic() + timeout_s
    store = distributed_c10d._world.pg_map[pg][1]

    dead = _known_dead(backend)
    current = _Membership(backend.uuid(), backend.rank(), backend.size())
    base, later = _decided.get(pg, (current.uuid, current))
    if base == current.uuid and later != current:
        current, dead = later, []
    while True:
        current, handles = _agree(store, current, backend.handle(), dead, deadline, timeout_s / 2)
        _decided[pg] = backend.uuid(), current
        if current.size < min_size:
            raise WorldTooSmall(f"{current.size} ranks are left, and min_size is {min_size}")
        # The attempt may take half of what is left, so that there can be another.
        attempt_s = max((deadline - time.monotonic()) / 2, 0.001)
        try:
            reconfigure(current.uuid, handles, pg, timedelta(seconds=attempt_s))
        except dist.DistBackendError as error:
            _logger.warning("rebuilding %s failed, agreeing again: %s", pg.group_name, error)
            if time.monotonic() >= deadline:
                raise
            dead = error.ranks if isinstance(error, PeerLost) else []
        else:
            return


def _known_dead(backend: Any) -> list[int]:
    """Returns the ranks whose death closed the group."""
    failure = backend.failure()
    return failure[2] if failure is not None and failure[0] == "PeerLost" else []


def _agree(
    store: dist.Store,
    current: _Membership,
    handle: str,
    dead: list[int],
    deadline: float,
    patience_s: float,
) -> tuple[_Membership, list[str]]:
    """Returns the membership after `current`, the same on all ranks, and its members' handles."""
    prefix = f"gpumode/after/{current.uuid}"
    decision_key = f"{prefix}/members"

    def handle_key(rank: int) -> str:
        return f"{prefix}/handle/{rank}"

    store.set(handle_key(current.rank), handle)
    impatient = min(time.monotonic() + patience_s, deadline)
    look_again_s = _LOOK_AGAIN_S[0]
    while not store.check([decision_key]):
        here = [rank for rank in range(current.size) if store.check([handle_key(rank)])]
        awaited = set(range(current.size)) - set(here) - set(dead)
        if not awaited or time.monotonic() >= impatient:
            store.compare_set(decision_key, "", json.dumps(here))
        elif time.monotonic() >= deadline:
            raise CollectiveTimeout(f"ranks {sorted(awaited)} did not agree on the next membership")
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
    return _Membership(uuid, members.index(current.rank), len(members)), handles


def _wait(store: dist.Store, key: str, seconds: float) -> None:
    """Returns when the key is there or the time is up, at which Store.wait would warn on stderr."""
    for _ in range(5):
        if store.check([key]):
            return
        time.sleep(seconds / 5)
