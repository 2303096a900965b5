"""Case B8: one rank calls something else. Every rank gets CollectiveMismatch, naming both sides."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, run

from torch_gpumode.distributed import CollectiveMismatch


def _all_reduce(count: int = 4, dtype: torch.dtype = torch.float32, op: str = "SUM") -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), getattr(dist.ReduceOp, op))


def _sparse(rows: int = 4, dims: int = 1, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.ones(rows, 3, dtype=dtype).to_sparse(dims))


# What all ranks but one call, what that one calls, and a word of each side that the text names.
CASES = {
    "collective": (
        _all_reduce,
        lambda: dist.broadcast(torch.ones(4), 0),
        ("all_reduce", "broadcast"),
    ),
    "dtype": (_all_reduce, lambda: _all_reduce(dtype=torch.float64), ("float32", "float64")),
    "op": (_all_reduce, lambda: _all_reduce(op="MAX"), ("sum", "max")),
    "numel": (_all_reduce, lambda: _all_reduce(count=5), ("4 elements", "5 elements")),
    "same bytes": (
        lambda: _all_reduce(count=4, dtype=torch.float32),
        lambda: _all_reduce(count=2, dtype=torch.float64),
        ("float32", "float64"),
    ),
    "float8": (
        lambda: dist.broadcast(torch.ones(4).to(torch.float8_e4m3fn), 0),
        lambda: dist.broadcast(torch.ones(4).to(torch.float8_e5m2), 0),
        ("float8_e4m3fn", "float8_e5m2"),
    ),
    "bytes of a wider type": (
        lambda: dist.broadcast(torch.ones(4, dtype=torch.uint8), 0),
        lambda: dist.broadcast(torch.ones(2, dtype=torch.uint16), 0),
        ("uint8", "uint16"),
    ),
    "order in memory": (
        lambda: dist.all_reduce(torch.ones(1, 3, 2, 2)),
        lambda: dist.all_reduce(torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last)),
        ("12 elements, not in the order of their indices",),
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(4), 0),
        lambda: dist.broadcast(torch.ones(4), 1),
        ("root 0", "root 1"),
    ),
    "order": (
        lambda: (dist.barrier(), _all_reduce()),
        lambda: (_all_reduce(), dist.barrier()),
        ("barrier", "all_reduce"),
    ),
    "large": (
        lambda: _all_reduce(count=3_000_000),
        lambda: _all_reduce(count=3_000_001),
        ("3000000 elements", "3000001 elements"),
    ),
    "coalesced": (
        lambda: dist.group.WORLD.allreduce_coalesced([torch.ones(3), torch.ones(4)]).wait(),
        lambda: dist.group.WORLD.allreduce_coalesced([torch.ones(3), torch.ones(5)]).wait(),
        ("all_reduce",),
    ),
    "sparse and dense": (
        _sparse,
        lambda: _all_reduce(count=12),
        ("all_reduce_sparse(float32)", "all_reduce(sum, float32, 12 elements)"),
    ),
    "dtype of sparse tensors": (
        _sparse,
        lambda: _sparse(dtype=torch.float64),
        ("all_reduce_sparse(float32)", "all_reduce_sparse(float64)"),
    ),
    "shape of sparse tensors": (
        _sparse,
        lambda: _sparse(rows=5),
        ("rank 0 brought one of shape [4, 3]", "one of shape [5, 3]"),
    ),
    "sparse dimensions": (
        _sparse,
        lambda: _sparse(dims=2),
        ("of which 1 are sparse", "of which 2 are sparse"),
    ),
}


def differ(me: Rank, case: str, odd: int) -> str:
    usual, other, _ = CASES[case]
    dist.all_reduce(torch.ones(1))
    with pytest.raises(CollectiveMismatch) as caught:
        (other if me.rank == odd else usual)()
    with pytest.raises(CollectiveMismatch):  # the group stays closed
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_mismatch(case, size, tmp_path):
    for text in run(differ, size, tmp_path, case, size - 1):
        for word in CASES[case][2]:
            assert word in text


def uneven_is_legal(me: Rank) -> None:
    outputs = [torch.empty(rank + 1) for rank in range(me.size)]
    dist.all_gather(outputs, torch.ones(me.rank + 1))
    assert [len(output) for output in outputs] == list(range(1, me.size + 1))
    dist.all_reduce(torch.ones(1))


def test_uneven_gathers_are_legal(tmp_path):
    run(uneven_is_legal, 3, tmp_path)


def async_ops(me: Rank) -> None:
    """The call itself never raises; waiting does."""
    works = [dist.all_reduce(torch.ones(2 + me.rank), async_op=True) for _ in range(3)]
    for work in works:
        with pytest.raises(CollectiveMismatch):
            work.wait()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert not work.is_success()
    with pytest.raises(CollectiveMismatch):
        work.wait()


def test_async(tmp_path):
    run(async_ops, 2, tmp_path)
