"""ZeroRedundancyOptimizer: a sharded optimizer's steps are those of one that is whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from _values import digest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as ZeRO
from torch.nn.parallel import DistributedDataParallel as DDP


def zero_sgd(model: nn.Module, **settings: object) -> ZeRO:
    return ZeRO(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9, **settings)


def steps(me: Rank, bucket_view: bool) -> str:
    model = DDP(mlp(seed=me.rank))
    optimizer = zero_sgd(model, parameters_as_bucket_view=bucket_view)
    train(model, optimizer, me.rank, steps=4)
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    assert 0 < len(optimizer.optim.state) < len(list(model.parameters()))
    return digest(list(model.state_dict().values()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_steps(bucket_view, size, tmp_path):
    assert len(set(run(steps, size, tmp_path, bucket_view))) == 1


def more_ranks_than_parameters(me: Rank) -> None:
    net = nn.Linear(7, 3, dtype=torch.float64)
    net.load_state_dict({name: p[:3, :7] if p.dim() > 1 else p[:3] for name, p in _layer().items()})
    reference = copy.deepcopy(net)
    model = DDP(net)
    optimizer = zero_sgd(model)
    train(model, optimizer, me.rank)
    assert_same(model, train_alone(reference, me.size))
    assert len(optimizer.optim.state) == (0 if me.rank == 2 else 1)


def _layer() -> dict[str, torch.Tensor]:
    return {"weight": mlp()[0].weight.detach(), "bias": mlp()[0].bias.detach()}


def in_a_subgroup(me: Rank) -> None:
    """Ranks within the group are not those of the world."""
    group = dist.new_group([1, 2])
    if me.rank == 0:
        return
    model = DDP(mlp(), process_group=group)
    optimizer = zero_sgd(model, process_group=group)
    train(model, optimizer, me.rank - 1)
    assert_same(model, train_alone(mlp(), 2))
    optimizer.consolidate_state_dict(to=1)
    if me.rank == 2:
        assert len(optimizer.state_dict()["state"]) == 6


def param_groups(me: Rank) -> None:
    """Groups with rates of their own, a late one, and a schedule."""
    model, reference = DDP(mlp()), mlp()

    def groups(net: nn.Sequential) -> list[dict]:
        return [
            {"params": [*net[0].parameters()], "lr": 0.1},
            {"params": [*net[2].parameters()], "momentum": 0.5},
        ]

    ours = ZeRO(groups(model.module), torch.optim.SGD, lr=0.3, momentum=0.9)
    theirs = torch.optim.SGD(groups(reference), lr=0.3, momentum=0.9)
    ours.add_param_group({"params": model.module[4].parameters(), "lr": 0.2})
    theirs.add_param_group({"params": reference[4].parameters(), "lr": 0.2})
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (ours, theirs)]
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        loss_of(model, me.rank, step).backward()
        for rank in range(me.size):
            (loss_of(reference, rank, step) / me.size).backward()
        ours.step(), theirs.step()
        for schedule in schedules:
            schedule.step()
    assert_same(model, reference)


@pytest.mark.parametrize("function", [more_ranks_than_parameters, in_a_subgroup, param_groups])
def test_shards(function, tmp_path):
    run(function, 3, tmp_path)


def consolidated(me: Rank) -> None:
    """Every rank in turn gets the whole state, with which one optimizer, or a new ZeRO, goes on."""
    model, reference = DDP(mlp()), mlp()
    ours = ZeRO(model.parameters(), torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)

    def step(optimizer: torch.optim.Optimizer, net: nn.Module, ranks: range, number: int) -> None:
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(net, rank, number) / len(ranks)).backward()
        optimizer.step()

    for number in range(3):
        step(ours, model, range(me.rank, me.rank + 1), number)
        step(theirs, reference, range(me.size), number)
    expected = theirs.state_dict()
    for to in range(me.size):
        ours.consolidate_state_dict(to=to)
        if me.rank != to:
            continue
        state = ours.state_dict()
        assert state["state"].keys() == expected["state"].keys()
        for index, of_one in expected["state"].items():
            for name, value in of_one.items():
                torch.testing.assert_close(state["state"][index][name], value)
        for a, b in zip(state["param_groups"], expected["param_groups"], strict=True):
            assert a["params"] == b["params"]
            assert a["lr"] == b["lr"]

    states = [state if me.rank == me.size - 1 else None]
    dist.broadcast_object_list(states, src=me.size - 1)
    alone = copy.deepcopy(model.module)
    one = torch.optim.AdamW(alone.parameters(), lr=0.1)
    one.load_state_dict(copy.deepcopy(states[0]))
    resumed = ZeRO(model.parameters(), torch.optim.AdamW, lr=0.7)
    resumed.load_state_dict(states[0])
    for number in range(3, 5):
        step(theirs, reference, range(me.size), number)
        step(one, alone, range(me.size), number)
        step(resumed, model, range(me.rank, me.rank + 1), number)
    assert_same(alone, reference)
    assert_same(model, reference)


@pytest.mark.parametrize("size", [2, 3])
def test_consolidated(size, tmp_path):
    run(consolidated, size, tmp_path)


def overlapped(me: Rank, interleaved: bool, shard_buckets: bool, static: bool) -> str:
    """torch's first steps, until the buckets are there, leave the parameters as they are.

    Interleaved, a link of a chain of futures broadcasts, which needs a single bucket: with several,
    nothing would order these broadcasts and the next all-reduces between the ranks.
    """
    model = DDP(
        mlp(seed=me.rank),
        static_graph=static,
        gradient_as_bucket_view=True,
        bucket_cap_mb=25 if interleaved else 1e-5,
    )
    optimizer = zero_sgd(model, overlap_with_ddp=True)
    wrap = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    hook = wrap(allreduce_hook, model, optimizer, shard_buckets=shard_buckets)
    model.register_comm_hook(None, hook)
    idle = 3 if static else 2
    for step in [0] * idle + list(range(4)):
        optimizer.zero_grad()
        loss_of(model, me.rank, step).backward()
        optimizer.step()
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    return digest(list(model.state_dict().values()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("interleaved", "shard_buckets", "static"),
    [(False, False, False), (False, True, False), (False, False, True), (True, False, False)],
)
def test_overlapped(interleaved, shard_buckets, static, size, tmp_path):
    args = interleaved, shard_buckets, static
    assert len(set(run(overlapped, size, tmp_path, *args, limit_s=30))) == 1


def accumulated(me: Rank) -> None:
    """Steps of two batches, of which the second one's backward reduces."""
    model, reference = DDP(mlp()), mlp()
    ours, theirs = zero_sgd(model), sgd(reference)
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        with model.no_sync():
            loss_of(model, me.rank, 2 * step).backward()
        loss_of(model, me.rank, 2 * step + 1).backward()
        for rank in range(me.size):
            for part in (0, 1):
                (loss_of(reference, rank, 2 * step + part) / me.size).backward()
        ours.step(), theirs.step()
    assert_same(model, reference)


def test_accumulated(tmp_path):
    run(accumulated, 2, tmp_path)
