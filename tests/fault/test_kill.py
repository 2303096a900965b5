"""Killed and frozen peers: every survivor raises, in time, and goes on (cases F3, F5, F9)."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks, repeat

import torch_gpumode.distributed as gd

DEADLINE_S = 2.0


def reduce_until_it_fails(me: Rank, count: int) -> tuple[str, list[int], float, bool]:
    """Returns the exception's name, its ranks and time, and whether the next op fails at once."""
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    me.say("ready")
    try:
        while True:
            dist.all_reduce(tensor.fill_(1))
    except dist.DistBackendError as error:
        raised = time.monotonic()
        group_fails = False
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError:
            group_fails = time.monotonic() - raised < 0.5
        return type(error).__name__, error.ranks, raised, group_fails


@pytest.mark.parametrize("count", [2, 4_000_000])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_all_reduce(signum, count, tmp_path):
    """Case F3."""
    with Ranks(reduce_until_it_fails, 3, tmp_path, count, timeout_s=DEADLINE_S) as ranks:
        ranks.heard_from_all()
        time.sleep(0.1)
        sent = ranks.signal(1, signum)
        results = ranks.join(lost=(1,))
    for rank in (0, 2):
        name, about, raised, group_fails = results[rank]
        assert group_fails
        assert 1 in about
        if signum == signal.SIGKILL:
            assert name == "PeerLost"
            assert raised - sent < DEADLINE_S, "a death is noticed, not waited for"
        else:
            assert name == "CollectiveTimeout"
            assert raised - sent < DEADLINE_S + 1


def test_one_of_eight_in_a_large_all_reduce(tmp_path):
    with Ranks(reduce_until_it_fails, 8, tmp_path, 4_000_000) as ranks:
        ranks.heard_from_all()
        time.sleep(0.2)
        sent = ranks.signal(3, signal.SIGKILL)
        results = ranks.join(lost=(3,))
    for rank in (0, 1, 2, 4, 5, 6, 7):
        name, about, raised, group_fails = results[rank]
        assert (name, about) == ("PeerLost", [3])
        assert group_fails
        assert raised - sent < 5, "within seconds, of a timeout of 30"


def reduce_with_a_child(me: Rank) -> tuple[str, list[int], float, bool]:
    """Rank 1 has a child, as DataLoader workers are, which lives on when it dies."""
    child = os.fork() if me.rank == 1 else -1
    if child == 0:
        time.sleep(30)
        os._exit(0)
    me.say(child)
    return reduce_until_it_fails(me, 4_000_000)


def test_a_child_that_outlives_the_lost_rank(tmp_path):
    with Ranks(reduce_with_a_child, 3, tmp_path) as ranks:
        child = [ranks.heard(rank) for rank in range(3)][1]
        try:
            ranks.heard_from_all()
            sent = ranks.signal(1, signal.SIGKILL)
            results = ranks.join(lost=(1,))
            os.kill(child, 0)  # it is still there, and holds what it has inherited
        finally:
            os.kill(child, signal.SIGKILL)
    for rank in (0, 2):
        name, about, raised, _ = results[rank]
        assert (name, about) == ("PeerLost", [1])
        assert raised - sent < 5, "not when the child ends"


def wait_in_a_ring(me: Rank) -> tuple[str, float]:
    """Each waits for its left neighbour; nobody but rank 1's neighbours deals with rank 1."""
    received = torch.empty(1)
    me.say("ready")
    try:
        dist.recv(received, (me.rank - 1) % me.size)
    except dist.DistBackendError as error:
        return type(error).__name__, time.monotonic()
    return "received", time.monotonic()


def test_ring(tmp_path):
    """Case F5: the neighbour learns of the death, and through it, or by deadline, the others."""
    with Ranks(wait_in_a_ring, 4, tmp_path, timeout_s=DEADLINE_S) as ranks:
        ranks.heard_from_all()
        time.sleep(0.1)
        sent = ranks.signal(1, signal.SIGKILL)
        results = ranks.join(lost=(1,))
    assert results[2][0] == "PeerLost"
    for rank in (0, 2, 3):
        assert results[rank][0] != "received"
        assert results[rank][1] - sent < DEADLINE_S + 1


def in_every_group(me: Rank) -> list[str]:
    """A 2 x 2 mesh; rank 3 dies."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[me.rank // 2], columns[me.rank % 2]
    me.say("ready")
    me.store("go").wait(["killed"])
    names = []
    for group in (row, column, dist.group.WORLD):
        try:
            dist.all_reduce(torch.ones(4), group=group)
            names.append("fine")
        except dist.DistBackendError as error:
            names.append(type(error).__name__)
    return names


def test_every_group_of_the_lost_rank(tmp_path):
    """Case F8: also the groups made from the default group, and only those that it was in."""
    with Ranks(in_every_group, 4, tmp_path) as ranks:
        ranks.heard_from_all()
        ranks.signal(3, signal.SIGKILL)
        ranks.store("go").set("killed", "1")
        results = ranks.join(lost=(3,))
    assert results[0] == ["fine", "fine", "PeerLost"]
    assert results[1] == ["fine", "PeerLost", "PeerLost"]
    assert results[2] == ["PeerLost", "fine", "PeerLost"]


def rebuild_and_reduce(me: Rank) -> list[float]:
    dist.all_reduce(torch.ones(1))
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(1_000_000)))
    gd.rebuild(timeout=timedelta(seconds=20))
    tensor = torch.full((1_000_003,), float(me.rank))
    dist.all_reduce(tensor)
    return tensor.unique().tolist()


def test_no_late_bytes(tmp_path):
    """What the dead rank or the aborted op left in shared memory never reaches a later result."""
    with Ranks(rebuild_and_reduce, 4, tmp_path) as ranks:
        ranks.heard_from_all()
        time.sleep(0.05)
        ranks.signal(2, signal.SIGKILL)
        assert ranks.join(lost=(2,)) == [[4.0], [4.0], None, [4.0]]
