"""Retried ops of a rank that the system refuses memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _calls import Call, Setting
from _ranks import Rank, Ranks, run
from _values import random_tensor, same_bits

import torch_gpumode.distributed as gd

TIMEOUT_S = 6.0


@contextmanager
def no_more_memory(beyond: int) -> Iterator[None]:
    """Allows so many bytes more than there are mapped; fewer if negative."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + beyond, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def for_the_result(me: Rank) -> None:
    """It cannot keep the result: all raise, and its next op is not taken for this one."""
    gd.barrier()
    tensors = [random_tensor(30_000_000, torch.float32, me.rank, key).clone() for key in range(2)]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        beyond = 32 << 20 if me.rank == 1 else 1 << 40
        match = "there is no memory to keep the result"
        with no_more_memory(beyond), pytest.raises(dist.DistBackendError, match=match):
            gd.all_reduce(tensor)
    assert all(map(same_bits, tensors, before))


def test_for_the_result(tmp_path):
    run(for_the_result, 2, tmp_path)


def for_the_group(me: Rank) -> None:
    """It cannot map the next group, says so, and does not shut out the others."""
    call = Call("all_reduce", Setting([0, 1, 2, 3], me.rank, 0))
    gd.barrier()
    if me.rank == 2:
        signal.raise_signal(signal.SIGKILL)
    if me.rank == 1:
        with no_more_memory(-(200 << 20)):
            error = call.raises(dist.DistBackendError, min_size=1)
        assert type(error) is dist.DistBackendError
        return
    assert call.run(min_size=1).contributors == (0, 3)
    call.assert_result_of((0, 3))


def test_for_the_group(tmp_path):
    with Ranks(for_the_group, 4, tmp_path, timeout_s=TIMEOUT_S) as ranks:
        ranks.join(lost=(2,))
