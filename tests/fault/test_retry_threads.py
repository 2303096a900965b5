"""Retried ops, and other threads of the same program."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _calls import Call, Setting
from _ranks import Rank, Ranks, check_group, run
from _values import random_tensor, same_bits

import torch_gpumode.distributed as gd
from torch_gpumode.distributed import _retry

TIMEOUT_S = 20.0


def in_turns(me: Rank, name: str) -> None:
    """The second call waits for the first, and its arguments belong to the ranks of before that."""
    everybody = [0, 1, 2, 3]
    store = me.store("in turns")
    if me.rank == 1:
        store.wait([f"called {rank}" for rank in (0, 2, 3)])
        signal.raise_signal(signal.SIGKILL)
    calls = [Call("all_reduce", Setting(everybody, me.rank, 2, 1))]
    calls.append(Call(name, Setting(everybody, me.rank, 2, 2)))
    outcomes: list[gd.Outcome] = []
    threads = [
        threading.Thread(target=lambda call=call: outcomes.append(call.run())) for call in calls
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    store.set(f"called {me.rank}", "")
    for thread in threads:
        thread.join()
    assert [outcome.contributors for outcome in outcomes] == [(0, 2, 3)] * 2
    for call in calls:
        call.assert_result_of((0, 2, 3))
    check_group(3)
    assert gd.initial_ranks() == [0, 2, 3]


@pytest.mark.parametrize(
    "name", ["broadcast", "all_gather", "scatter", "reduce_scatter_tensor", "all_to_all_single"]
)
def test_turns(name, tmp_path):
    with Ranks(in_turns, 4, tmp_path, name, timeout_s=TIMEOUT_S) as ranks:
        ranks.join(lost=(1,))


def destroyed(me: Rank, retry: bool) -> float:
    """Returns how long the op took, whose group another thread has destroyed."""
    gd.barrier()
    if me.rank == 1:
        me.store().wait(["over"])
        return 0.0
    x = random_tensor(1003, torch.int64, me.rank).clone()
    before = x.clone()
    threading.Timer(0.3, dist.destroy_process_group).start()
    began = time.monotonic()
    with pytest.raises(gd.CollectiveAborted, match="the group was destroyed"):
        gd.all_reduce(x, retry=retry)
    took = time.monotonic() - began
    assert same_bits(x, before)
    me.store().set("over", "")
    return took


@pytest.mark.parametrize("retry", [False, True])
def test_destroyed(retry, tmp_path):
    with Ranks(destroyed, 2, tmp_path, retry, timeout_s=TIMEOUT_S) as ranks:
        assert 0.2 < ranks.join()[0] < TIMEOUT_S / 2


def interrupted(me: Rank) -> None:
    """Ctrl-C after the group was rebuilt, and before torch's tables know."""
    group = dist.new_group([0, 1, 2, 3])
    call = Call("all_reduce", Setting([0, 1, 2, 3], me.rank, 0))
    if me.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    remember, seen = _retry.remember_members, group.size()

    def remember_or_raise(*args: object) -> None:
        if group.size() != seen:
            raise KeyboardInterrupt
        remember(*args)

    _retry.remember_members = remember_or_raise
    with pytest.raises(KeyboardInterrupt):
        call.run(group=group)
    _retry.remember_members = remember
    x = random_tensor(1003, torch.int64, me.rank).clone()
    gd.broadcast(x, src=2, group=group)  # that is a global rank: of the world, which has 4 ranks
    assert same_bits(x, random_tensor(1003, torch.int64, 2))


def test_interrupted(tmp_path):
    with Ranks(interrupted, 4, tmp_path, timeout_s=TIMEOUT_S) as ranks:
        ranks.join(lost=(1,))


def compiled(me: Rank) -> None:
    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> tuple[torch.Tensor, gd.Outcome]:
        y = x * 2
        outcome = gd.all_reduce(y)
        return y + 1, outcome

    x = random_tensor(1003, torch.int64, me.rank)
    for _ in range(2):
        y, outcome = step(x)
        total = sum(random_tensor(1003, torch.int64, rank) for rank in range(me.size))
        assert same_bits(y, total * 2 + 1)
        assert outcome == ((0, 1), 1)


def test_in_a_compiled_function(tmp_path):
    run(compiled, 2, tmp_path)


def extended(me: Rank) -> None:
    """An extension of timeouts does not touch what is retried."""
    dist.group.WORLD._add_ephemeral_timeout(timedelta(seconds=TIMEOUT_S))
    if me.rank == 1:
        me.store().wait(["over"])
        return
    began = time.monotonic()
    with pytest.raises(gd.CollectiveTimeout):
        gd.all_reduce(torch.ones(2), timeout=timedelta(seconds=1), min_size=2)
    assert time.monotonic() - began < 2
    me.store().set("over", "")


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "_add_ephemeral_timeout"), reason="came with a later torch"
)
def test_extended_timeouts(tmp_path):
    run(extended, 2, tmp_path)
