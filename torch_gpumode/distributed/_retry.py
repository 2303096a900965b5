"""Collectives that survive the loss of ranks.

outcome = torch_gpumode.distributed.all_reduce(gradient, op=ReduceOp.AVG)

The op is tried, and if ranks are lost, tried again with those that are left, until all of them have
the same result. Nobody's tensors change before that: an op that raises has changed nothing (but
Ctrl-C, which Python raises when it comes to it, perhaps after the op). What
exactly is promised, and what is not, is in docs/commit-protocol.md. What all functions here share:

- They block until the result is certain. Their order, arguments and results are those of
  torch.distributed, and all ranks of the group call them, all with `retry` or all without.
- After a loss the group is rebuilt in place, as `rebuild` does: its rank() and size() change before
  the function returns. Other groups of the lost ranks stay closed until they are rebuilt or used
  here themselves.
- Tensors and ranks among the arguments belong to the ranks as they were when the function was
  called, and keep doing so: tensors of lost ranks in `all_gather`'s list stay as they were, input
  for them is dropped, and an op whose root is lost raises. Tensors that are written must not
  overlap.
- `timeout` (the group's own if None) bounds all of it. One try may take half of what is left, and a
  rank that does not come, frozen or busy with something else, is waited for a third of what is left
  then. So it is left out for good after two thirds of the first timeout that ends.
- `min_size` is the smallest world to go on with after a loss; the same on all ranks. None: one rank
  is enough if all others are known to be dead, but it takes half of those that may be alive to
  leave out the other half.
- `retry=False` calls torch's function.

They raise, besides what torch's functions raise:
    PeerLost: the root of the op is lost; the group goes on without it.
    CollectiveTimeout: there was no result within `timeout`, or too few ranks came to go on without
        those that may be alive.
    CollectiveAborted: `abort` was called, or another rank's program starts over: it called
        `rebuild`, and does not come back to this op.
    CollectiveMismatch: ranks called different ops, or only some with `retry`.
    WorldTooSmall: fewer than `min_size` ranks are left, or the others went on without this one.
        What they made of its last op is not known then.
    torch.distributed.DistStoreError, torch.distributed.DistNetworkError: a rank was lost, and the
        store is gone, too.
    ValueError: `timeout` or `min_size` is not positive, a tensor is sparse, ops are coalesced, or
        the group has no gpumode backend.
    TypeError: `timeout` is no timedelta.
    RuntimeError: the group has another backend, too, or TORCH_DISTRIBUTED_DEBUG=DETAIL has put it
        behind one of torch's own; these cannot be rebuilt.
    torch.distributed.DistBackendError itself: the system refused something, such as memory.
After any but PeerLost, ValueError, TypeError and RuntimeError the group must be rebuilt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_gpumode.distributed._groups import (
    backend_of,
    checked_timeout,
    make_rebuildable,
    remember_members,
)
from torch_gpumode.distributed._rebuild import check_min_size

_Group = dist.ProcessGroup | None
# torch 2.14 has new names for these two, and warns of the old ones.
_all_gather_into_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_backends: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


class Outcome(NamedTuple):
    """What became of an op; the same on all ranks that have its result.

    Attributes:
        contributors: whose inputs the result holds, and how many an average divides by; see
            `initial_ranks` for how they are named.
        attempts: how often this rank tried.
    """

    contributors: tuple[int, ...]
    attempts: int


def _run(*arguments: Any) -> Outcome:
    # torch.compile is not to look into it, and is not loaded for those who do not use it.
    if "torch._dynamo" not in sys.modules:
        return _run_eagerly(*arguments)
    global _run_uncompiled
    if _run_uncompiled is None:
        _run_uncompiled = torch.compiler.disable(_run_eagerly)
    return _run_uncompiled(*arguments)


_run_uncompiled: Callable[..., Outcome] | None = None


def _run_eagerly(
    call: Callable[[], object],
    group: _Group,
    retry: bool,
    timeout: timedelta | None,
    min_size: int | None,
) -> Outcome:
    pg = group if group is not None else distributed_c10d._get_default_group()
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this rank is in")
    backend = _backends.get(pg) if pg in distributed_c10d._world.pg_map else None
    if backend is None:
        backend = backend_of(pg)
        make_rebuildable(pg, backend)
        _backends[pg] = backend
    if pg in distributed_c10d._world.pg_coalesce_state:
        raise ValueError("retry: an op that is coalesced with others cannot be retried")
    if not retry:
        call()
        return Outcome(tuple(backend.initial_ranks()), 1)
    check_min_size(min_size)
    if timeout is not None:
        timeout = checked_timeout(timeout, backend)
    remember_members(pg, backend)  # an exception may have come in between, last time
    try:
        return Outcome(*backend.retried(call, timeout, min_size))
    finally:
        remember_members(pg, backend)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.all_reduce`, in place; all ranks get the same bits.

    AVG divides by the number of contributors. See the module for what is retried and raised.
    """
    return _run(lambda: dist.all_reduce(tensor, op, group), group, retry, timeout, min_size)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`all_reduce` of several tensors of one dtype as one op: all of them change, or none."""
    pg = group if group is not None else distributed_c10d._get_default_group()
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    return _run(
        lambda: pg.allreduce_coalesced(tensors, options).wait(), group, retry, timeout, min_size
    )


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: _Group = None,
    *,
    group_src: int | None = None,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.broadcast`. The contributors are all members, not the root alone."""
    return _run(
        lambda: dist.broadcast(tensor, src, group, group_src=group_src),
        *(group, retry, timeout, min_size),
    )


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: _Group = None,
    *,
    group_dst: int | None = None,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.reduce`; `tensor` changes on the root only."""
    return _run(
        lambda: dist.reduce(tensor, dst, op, group, group_dst=group_dst),
        *(group, retry, timeout, min_size),
    )


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.all_gather`; the tensors of lost ranks stay as they were."""
    return _run(
        lambda: dist.all_gather(tensor_list, tensor, group), group, retry, timeout, min_size
    )


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.all_gather_into_tensor`; the parts of lost ranks stay as they were."""
    return _run(
        lambda: _all_gather_into_tensor(output_tensor, input_tensor, group),
        *(group, retry, timeout, min_size),
    )


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: _Group = None,
    *,
    group_dst: int | None = None,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.gather`; the root's tensors of lost ranks stay as they were."""
    return _run(
        lambda: dist.gather(tensor, gather_list, dst, group, group_dst=group_dst),
        *(group, retry, timeout, min_size),
    )


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: _Group = None,
    *,
    group_src: int | None = None,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.scatter`; what the root has for lost ranks is dropped."""
    return _run(
        lambda: dist.scatter(tensor, scatter_list, src, group, group_src=group_src),
        *(group, retry, timeout, min_size),
    )


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.reduce_scatter`; what there is for lost ranks is dropped."""
    return _run(
        lambda: dist.reduce_scatter(output, input_list, op, group),
        *(group, retry, timeout, min_size),
    )


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: Any = dist.ReduceOp.SUM,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.reduce_scatter_tensor`; what there is for lost ranks is dropped."""
    return _run(
        lambda: _reduce_scatter_tensor(output, input, op, group),
        *(group, retry, timeout, min_size),
    )


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.all_to_all`; lost ranks give nothing and get nothing."""
    return _run(
        lambda: dist.all_to_all(output_tensor_list, input_tensor_list, group),
        *(group, retry, timeout, min_size),
    )


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.all_to_all_single`; lost ranks give nothing and get nothing."""
    return _run(
        lambda: dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group),
        *(group, retry, timeout, min_size),
    )


def barrier(
    group: _Group = None,
    *,
    retry: bool = True,
    timeout: timedelta | None = None,
    min_size: int | None = None,
) -> Outcome:
    """`torch.distributed.barrier`, of those that are left."""
    return _run(lambda: dist.barrier(group), group, retry, timeout, min_size)
