"""Killed and frozen peers in an all_reduce of sparse tensors: every survivor raises, in time."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks

DEADLINE_S = 2.0


def sum_until_it_fails(me: Rank, rows: int) -> tuple[str, list[int], float]:
    """Returns the exception's name, its ranks and time."""
    generator = torch.Generator().manual_seed(me.rank)
    tensor = torch.randn(rows, 64, generator=generator).to_sparse(1)
    dist.all_reduce(tensor.clone())
    me.say("ready")
    try:
        while True:
            dist.all_reduce(tensor.clone())
    except dist.DistBackendError as error:
        return type(error).__name__, error.ranks, time.monotonic()


@pytest.mark.parametrize("rows", [2, 4000])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_sparse_all_reduce(signum, rows, tmp_path):
    with Ranks(sum_until_it_fails, 3, tmp_path, rows, timeout_s=DEADLINE_S) as ranks:
        ranks.heard_from_all()
        time.sleep(0.1)
        sent = ranks.signal(1, signum)
        results = ranks.join(lost=(1,))
    for rank in (0, 2):
        name, about, raised = results[rank]
        assert 1 in about
        assert name == ("PeerLost" if signum == signal.SIGKILL else "CollectiveTimeout")
        assert raised - sent < DEADLINE_S + (0 if signum == signal.SIGKILL else 1)
