"""The survivors of a group agree who is left, and go on. csrc/core/succession.h says how."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed._groups import (
    backend_of,
    checked_timeout,
    rebuilding,
    remember_members,
)

_logger = logging.getLogger(__name__)


def rebuild(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> None:
    """Rebuilds a group with the ranks that are left. Called by each of them after a failure.

    The group stays the same object, with new ranks in the old order; see `reconfigure` for what
    that means for global ranks and other groups. A group that has not failed is aborted, so that
    the others come too. Ranks that are known to be dead are not waited for; others, such as a
    frozen one, are for a third of `timeout`. The group's store has to live: with torchrun it lives
    in the agent, otherwise in rank 0.

    A rank that calls it says that its program starts over: a retried op (see `all_reduce`) that
    other ranks are in raises `CollectiveAborted` there, unless its result is certain already.

    Args:
        group: the default group if None.
        timeout: bounds the whole of it; the group's own if None.
        min_size: the smallest world to go on with. None: one rank is enough if all others are known
            to be dead, but it takes half of those that may be alive to leave out the other half.

    Raises:
        WorldTooSmall: fewer than `min_size` ranks are left, or they went on without this one.
        CollectiveTimeout: there was no agreement within `timeout`, too few ranks came to go on
            without those that may be alive, or the store did not answer.
        torch.distributed.DistStoreError, torch.distributed.DistNetworkError: the store is gone.
        ValueError: `min_size` or `timeout` is not positive, or the group has no gpumode backend.
        RuntimeError: another thread rebuilds the group, or TORCH_DISTRIBUTED_DEBUG=DETAIL has put
            it behind one of torch's own that cannot be rebuilt.
    """
    check_min_size(min_size)
    pg = group if group is not None else distributed_c10d._get_default_group()
    backend = backend_of(pg)
    timeout = checked_timeout(timeout, backend)
    began, rank, size = time.monotonic(), backend.rank(), backend.size()
    with rebuilding(pg, backend):
        attempt = backend.begin_rebuild(timeout, min_size)
        try:
            while (pause := attempt.step()) is not None:
                time.sleep(pause)
        finally:
            attempt.close()
            remember_members(pg, backend)
    _logger.info(
        "rebuilt %s in %.1f ms: rank %d of %d, which was rank %d of %d",
        *(pg.group_name, (time.monotonic() - began) * 1e3),
        *(backend.rank(), backend.size(), rank, size),
    )


def check_min_size(min_size: int | None) -> None:
    if min_size is not None and (not isinstance(min_size, int) or min_size < 1):
        raise ValueError(f"min_size: expected 1 or more, got {min_size!r}")
