"""Retried collectives through deaths, freezes and aborts (cases F3, F9)."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
import torch
import torch.distributed as dist
from _calls import CASES, ROOTED, Call, Setting
from _ranks import Rank, Ranks, check_group, repeat
from _values import digest, random_tensor

import torch_gpumode.distributed as gd

TIMEOUT_S = 2.0

Log = dict[int, tuple[int, ...]]  # who contributed to each step


def until_one_is_lost(me: Rank, name: str, lost: int, members: list[int], log: Log) -> None:
    """Runs ops until one has succeeded without the lost rank, and checks each."""
    members = list(members)
    for step in itertools.count():
        call = Call(name, Setting(members, me.rank, 2, step))
        if step == 4:
            me.say("ready")
        outcome = call.run()
        log[step] = outcome.contributors
        call.assert_result_of(outcome.contributors)
        if dist.get_world_size() < len(members):
            members.remove(lost)
        if lost not in outcome.contributors:
            return


def lose_one(me: Rank, name: str) -> tuple[Log, float]:
    log: Log = {}
    until_one_is_lost(me, name, 1, list(range(me.size)), log)
    went_on = time.monotonic()
    check_group(me.size - 1)  # plain ops work, too
    survivors = [rank for rank in range(me.size) if rank != 1]
    call = Call(name, Setting(survivors, me.rank, 2))
    assert call.run() == (tuple(survivors), 1)
    call.assert_result_of(survivors)
    return log, went_on


def assert_agreed(logs: list[Log], survivors: tuple[int, ...]) -> None:
    everything: Log = {}
    for log in logs:
        for step, contributors in log.items():
            assert everything.setdefault(step, contributors) == contributors, f"step {step}"
    *before, last = (everything[step] for step in sorted(everything))
    assert last == survivors
    assert all(len(contributors) == len(survivors) + 1 for contributors in before)


@pytest.mark.parametrize(("i", "name"), list(enumerate(CASES)))
def test_kill(i, name, tmp_path):
    """With a timeout of 10 minutes nobody waits for it (case F9)."""
    size = 4 + i % 2 if name in ROOTED else 3 + i % 3
    with Ranks(lose_one, size, tmp_path, name, timeout_s=600) as ranks:
        ranks.heard_from_all()
        time.sleep(0.01 * i)
        sent = ranks.signal(1, signal.SIGKILL)
        results = [result for result in ranks.join(lost=(1,)) if result]
    assert_agreed([log for log, _ in results], tuple(r for r in range(size) if r != 1))
    assert all(went_on - sent < 1 for _, went_on in results)


def lose_roots(me: Rank) -> None:
    """The root of each op dies before it. In the end one rank is left, and goes on."""
    members = list(range(me.size))
    for step, name in enumerate(ROOTED):
        root = members[-1]
        check_group(len(members))
        if me.rank == root:
            signal.raise_signal(signal.SIGKILL)
        error = Call(name, Setting(members, me.rank, root, step)).raises(gd.PeerLost, "root")
        assert error.ranks == [root]
        members.remove(root)
        check_group(len(members))
        call = Call(name, Setting(members, me.rank, 0, step + 1))
        assert call.run() == (tuple(members), 1)
        call.assert_result_of(members)
    assert members == [0]
    for name in CASES:
        call = Call(name, Setting([0], 0, 0, 1))
        assert call.run() == ((0,), 1)
        call.assert_result_of([0])


def test_lost_roots(tmp_path):
    with Ranks(lose_roots, 5, tmp_path) as ranks:
        ranks.join(lost=(1, 2, 3, 4))


def freeze(me: Rank, name: str) -> tuple[Log, float]:
    log: Log = {}
    if me.rank != 1:
        until_one_is_lost(me, name, 1, list(range(me.size)), log)
        went_on = time.monotonic()
        me.say("went on")
        me.store().wait(["thawed"])  # all live, and have another epoch
        check_group(me.size - 1)
        return log, went_on
    everybody = list(range(me.size))
    for step in itertools.count():
        call = Call(name, Setting(everybody, me.rank, 2, step))
        if step == 4:
            me.say("ready")
        before = [tensor.clone() for tensor in call.memory()]
        try:
            log[step] = call.run().contributors
        except gd.WorldTooSmall:
            break
    call.assert_holds(before)
    call.raises(gd.WorldTooSmall, "went on without rank 1")
    with pytest.raises(gd.WorldTooSmall, match="went on without rank 1"):
        gd.rebuild()
    call.raises(gd.WorldTooSmall, "went on without rank 1")
    me.store().set("thawed", "")
    return log, 0.0


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter_tensor"])
def test_freeze(name, tmp_path):
    with Ranks(freeze, 3, tmp_path, name, timeout_s=TIMEOUT_S) as ranks:
        ranks.heard_from_all()
        sent = ranks.signal(1, signal.SIGSTOP)
        assert [ranks.heard(rank) for rank in (0, 2)] == ["went on"] * 2
        ranks.signal(1, signal.SIGCONT)
        results = ranks.join()
    assert_agreed([log for log, _ in results], (0, 2))
    assert all(went_on - sent < TIMEOUT_S + 1 for _, went_on in results)


def frozen_root(me: Rank) -> float:
    check_group(3)
    call = Call("broadcast", Setting([0, 1, 2], me.rank, 1, 1))
    if me.rank == 1:
        me.say("frozen")
        signal.raise_signal(signal.SIGSTOP)
        call.raises(gd.WorldTooSmall, "went on without rank 1")
        return 0.0
    began = time.monotonic()
    call.raises(gd.PeerLost, "root")
    took = time.monotonic() - began
    check_group(2)
    me.say("went on")
    return took


def test_frozen_root(tmp_path):
    with Ranks(frozen_root, 3, tmp_path, timeout_s=TIMEOUT_S) as ranks:
        assert [ranks.heard(rank) for rank in (1, 0, 2)] == ["frozen", "went on", "went on"]
        ranks.signal(1, signal.SIGCONT)
        assert max(ranks.join()) < TIMEOUT_S + 1


def too_few(me: Rank) -> None:
    check_group(3)
    if me.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    s = Setting([0, 1, 2], me.rank, 2, 1)
    for call in (Call(name, s) for name in CASES):
        call.raises(gd.WorldTooSmall, "2 ranks are left, and min_size is 3", min_size=3)
        call.raises(gd.WorldTooSmall, "min_size is 3", min_size=1)  # until it is rebuilt
    with pytest.raises(gd.WorldTooSmall, match="min_size is 3"):
        gd.rebuild(min_size=3)
    gd.rebuild(min_size=2)
    check_group(2)
    call = Call("all_reduce", Setting([0, 2], me.rank, 2))
    assert call.run(min_size=2) == ((0, 2), 1)
    call.assert_result_of([0, 2])


def test_min_size(tmp_path):
    with Ranks(too_few, 3, tmp_path) as ranks:
        ranks.join(lost=(1,))


def computing(me: Rank, name: str) -> None:
    """Rank 3 is late, and hears of the death when it comes: the others redo the op with it."""
    check_group(4)
    if me.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    if me.rank == 3:
        time.sleep(0.4)
    call = Call(name, Setting([0, 1, 2, 3], me.rank, 2, 1))
    assert call.run().contributors == (0, 2, 3)
    call.assert_result_of([0, 2, 3])


@pytest.mark.parametrize("name", ["all_reduce", "scatter", "all_to_all_single"])
def test_computing(name, tmp_path):
    with Ranks(computing, 4, tmp_path, name) as ranks:
        ranks.join(lost=(1,))


def after_plain_ops(me: Rank, in_flight: bool) -> None:
    """The group has failed before, or fails over async ops that are in flight."""
    if in_flight:
        works = [dist.all_reduce(torch.randn(100_000), async_op=True) for _ in range(2)]
        works[1].wait()
        if me.rank == 1:
            signal.raise_signal(signal.SIGKILL)
        works += [dist.all_reduce(torch.randn(100_000), async_op=True) for _ in range(2)]
    else:
        me.say("ready")
        with pytest.raises(gd.PeerLost):
            repeat(lambda: dist.all_reduce(torch.randn(1000)))
    call = Call("all_gather", Setting([0, 1, 2], me.rank, 2, 1))
    outcome = call.run()
    assert outcome.contributors == (0, 2)
    assert in_flight or outcome.attempts == 1
    call.assert_result_of([0, 2])
    if in_flight:
        for work in works[2:]:
            with pytest.raises(gd.PeerLost):
                work.wait()
    check_group(2)


@pytest.mark.parametrize("in_flight", [False, True])
def test_after_plain_ops(in_flight, tmp_path):
    with Ranks(after_plain_ops, 3, tmp_path, in_flight) as ranks:
        if not in_flight:
            ranks.heard_from_all()
            ranks.signal(1, signal.SIGKILL)
        ranks.join(lost=(1,))


def gradients(model: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    inputs = random_tensor(200, torch.float32, rank, step).view(10, 20)
    return list(torch.autograd.grad(model(inputs).square().mean(), list(model.parameters())))


def train(me: Rank) -> tuple[Log, str]:
    """As data-parallel trainers do, without their wrapper."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7))
    log: Log = {}
    while len(log) < 5 or log[len(log) - 5] != (2, 3):
        step = len(log)
        mine = gradients(model, me.rank, step)
        log[step] = gd.all_reduce_coalesced(mine, dist.ReduceOp.AVG).contributors
        all_gradients = [gradients(model, rank, step) for rank in log[step]]
        for got, *inputs in zip(mine, *all_gradients, strict=True):
            torch.testing.assert_close(got, torch.stack(inputs).mean(0))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), mine, strict=True):
                parameter -= 0.1 * gradient
        if step == 0 or log[step] != log[step - 1]:
            me.say(log[step])
    return log, digest([parameter.detach() for parameter in model.parameters()])


def test_train(tmp_path):
    with Ranks(train, 4, tmp_path) as ranks:
        assert ranks.heard_from_all() == [(0, 1, 2, 3)] * 4
        ranks.signal(1, signal.SIGKILL)
        assert [ranks.heard(rank) for rank in (0, 2, 3)] == [(0, 2, 3)] * 3
        ranks.signal(0, signal.SIGKILL)
        one, other = ranks.join(lost=(0, 1))[2:]
    assert one == other
