"""Killed and frozen peers in monitored_barrier: who is missing is named, dead or not."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from _ranks import Rank, Ranks

import torch_gpumode.distributed as gd

LONG_S = 30.0


def wait_for_the_lost(
    me: Rank, timeout_s: float, wait_all_ranks: bool, missing: int
) -> tuple[str, str, list[int], float]:
    """Rank 1 is killed or frozen; a rank `missing` lives, and does not come.

    Returns the exception's name, text, ranks and time.
    """
    gd.monitored_barrier()
    me.say("ready")
    if me.rank in (1, missing):
        time.sleep(LONG_S)
    try:
        gd.monitored_barrier(None, timedelta(seconds=timeout_s), wait_all_ranks)
    except dist.DistBackendError as error:
        return type(error).__name__, str(error), error.ranks, time.monotonic()
    return "passed", "", [], time.monotonic()


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_monitored_barrier(signum, wait_all_ranks, tmp_path):
    """A death is noticed, not waited for, if nobody else is missing."""
    killed = signum == signal.SIGKILL
    timeout_s = LONG_S if killed else 1.0
    with Ranks(wait_for_the_lost, 3, tmp_path, timeout_s, wait_all_ranks, -1) as ranks:
        ranks.heard_from_all()
        sent = ranks.signal(1, signum)
        results = ranks.join(lost=(1,))
    names = "Ranks 1" if wait_all_ranks else "Rank 1"
    for rank in (0, 2):
        name, text, about, raised = results[rank]
        assert (name, about) == ("PeerLost" if killed else "CollectiveTimeout", [1])
        assert f"{names} failed to pass monitoredBarrier" in text
        assert raised - sent < 5


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_dead_rank_and_one_that_does_not_come(wait_all_ranks, tmp_path):
    """Only wait_all_ranks waits for the other, until the time is up, and names both."""
    timeout_s = 1.0 if wait_all_ranks else LONG_S
    with Ranks(wait_for_the_lost, 4, tmp_path, timeout_s, wait_all_ranks, 3) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        results = ranks.join(lost=(1, 3))
    for rank in (0, 2):
        name, text, about, _ = results[rank]
        if wait_all_ranks:
            assert (name, about) == ("CollectiveTimeout", [1, 3])
            assert "Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms" in text
        else:
            assert (name, about) == ("PeerLost", [1])
            assert "Rank 1 failed to pass monitoredBarrier" in text
