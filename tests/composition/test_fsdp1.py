"""FullyShardedDataParallel, the first FSDP, on CPU: strategies, summoned parameters, states."""

from __future__ import annotations

import copy

import pytest
import torch
from _models import assert_same, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def shard(model: nn.Module, **settings: object) -> FSDP:
    kwargs = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": True}
    return FSDP(model, device_id=torch.device("cpu"), **{**kwargs, **settings})


SETTINGS = {
    "full shard": {},
    "flat parameters": {"use_orig_params": False},
    "shard grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "one unit": {"auto_wrap_policy": None},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
}


def steps(me: Rank, name: str) -> None:
    model = shard(mlp(), **SETTINGS[name])
    train(model, sgd(model), me.rank, steps=4)
    reference = train_alone(mlp(), me.size, steps=4)
    with FSDP.summon_full_params(model):
        assert_same(model, reference)


@pytest.mark.parametrize("name", SETTINGS)
def test_steps(name, tmp_path):
    run(steps, 3, tmp_path, name)


def hybrid(me: Rank) -> None:
    """Sharded in pairs, by a mesh or by two groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    strategies = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    for strategy in strategies:
        for where in ({"device_mesh": mesh}, {"process_group": groups}):
            model = shard(mlp(), sharding_strategy=strategy, **where)
            train(model, sgd(model), me.rank)
            with FSDP.summon_full_params(model):
                assert_same(model, train_alone(mlp(), me.size))


def test_hybrid(tmp_path):
    run(hybrid, 4, tmp_path)


def accumulate(me: Rank) -> None:
    model, reference = shard(mlp()), mlp()
    ours, theirs = sgd(model), sgd(reference)
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        with model.no_sync():
            loss_of(model, me.rank, 2 * step).backward()
        loss_of(model, me.rank, 2 * step + 1).backward()
        for rank in range(me.size):
            for part in (0, 1):
                (loss_of(reference, rank, 2 * step + part) / me.size).backward()
        ours.step(), theirs.step()
    with FSDP.summon_full_params(model):
        assert_same(model, reference)


def mixed(me: Rank) -> None:
    """Reduced in bfloat16, in which an error of a part in a hundred is to be expected."""
    precision = MixedPrecision(reduce_dtype=torch.bfloat16)
    model, reference = shard(mlp(), mixed_precision=precision), mlp()
    loss_of(model, me.rank).backward()
    for rank in range(me.size):
        (loss_of(reference, rank) / me.size).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            atol = 2e-2 * theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=atol)


def clip(me: Rank) -> None:
    for norm_type in (2.0, float("inf")):
        model, reference = (mlp(dtype=torch.float32) for _ in range(2))
        model = shard(model)
        loss_of(model, me.rank).backward()
        for rank in range(me.size):
            (loss_of(reference, rank) / me.size).backward()
        norm = model.clip_grad_norm_(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        assert expected > 0.1
        torch.testing.assert_close(norm, expected)
        with FSDP.summon_full_params(model, with_grads=True):
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


def summon(me: Rank) -> None:
    """What is written to summoned parameters is there afterwards, on every rank."""
    model = shard(mlp(seed=1))
    with FSDP.summon_full_params(model):
        assert_same(model, mlp(seed=1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    expected = mlp(seed=1)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(3)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        if me.rank == 0:
            assert_same(model, expected)
    torch.testing.assert_close(loss_of(model, me.rank), loss_of(expected, me.rank))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [accumulate, mixed, clip, summon])
def test_gradients(function, size, tmp_path):
    run(function, size, tmp_path)


def states(me: Rank, kind: StateDictType) -> None:
    """A model and its optimizer are saved, loaded into others, and go on the same."""
    model, other = shard(mlp()), shard(mlp(seed=1))
    optimizer, another = sgd(model), sgd(other)
    train(model, optimizer, me.rank, steps=3)
    reference = train_alone(mlp(), me.size, steps=3)
    with FSDP.state_dict_type(model, kind):
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    if kind == StateDictType.FULL_STATE_DICT:
        for name, expected in reference.state_dict().items():
            torch.testing.assert_close(state[name], expected)
    with FSDP.state_dict_type(other, kind):
        other.load_state_dict(copy.deepcopy(state))
        another.load_state_dict(FSDP.optim_state_dict_to_load(other, another, optim_state))
    for step in range(3, 5):
        for each, steps_it in ((model, optimizer), (other, another)):
            steps_it.zero_grad()
            loss_of(each, me.rank, step).backward()
            steps_it.step()
    for each in (model, other):
        with FSDP.summon_full_params(each):
            assert_same(each, train_alone(mlp(), me.size, steps=5))


KINDS = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_states(kind, size, tmp_path):
    run(states, size, tmp_path, kind)


def local_states(me: Rank) -> None:
    model, other = (shard(mlp(seed=seed), use_orig_params=False) for seed in (0, 1))
    train(model, sgd(model), me.rank)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
    with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(state)
    with FSDP.summon_full_params(other):
        assert_same(other, train_alone(mlp(), me.size))


def state_on_rank_0(me: Rank) -> None:
    model = shard(mlp())
    optimizer = sgd(model)
    train(model, optimizer, me.rank)
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    if me.rank != 0:
        assert not state
        assert not optim_state
        return
    for name, expected in train_alone(mlp(), me.size).state_dict().items():
        torch.testing.assert_close(state[name], expected)
    assert optim_state["state"]["0.weight"]["momentum_buffer"].shape == (11, 7)


@pytest.mark.parametrize("function", [local_states, state_on_rank_0])
def test_other_states(function, tmp_path):
    run(function, 3, tmp_path)
