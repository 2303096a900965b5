"""FSDP2's states in memory: passed on in shards, broadcast to a model on meta, kept offloaded."""

from __future__ import annotations

import pytest
import torch
from _models import assert_same, loss_of, mlp, sgd, train, train_alone, whole
from _ranks import Rank, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def shard(model: nn.Sequential, size: int, **settings: object) -> nn.Sequential:
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (size,)), **settings)
    return model


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in (3, 4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def sharded(me: Rank) -> None:
    """Each rank keeps its shards, in memory."""
    model, other = (shard(mlp(seed=seed), me.size) for seed in (0, 1))
    optimizer, another = sgd(model), sgd(other)
    train(model, optimizer, me.rank, steps=3)
    reference = train_alone(mlp(), me.size, steps=3)
    state = model.state_dict()
    for name, expected in reference.state_dict().items():
        assert state[name].to_local().shape != expected.shape
        torch.testing.assert_close(whole(state[name]), expected)
    other.load_state_dict(state)
    loaded = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(other, another, loaded)
    go_on(other, another, me.rank)
    assert_same(other, train_alone(mlp(), me.size, steps=5))


def on_meta(me: Rank) -> None:
    """A model without storage gets it sharded, and its values from rank 0."""
    with torch.device("meta"):
        empty = nn.Sequential(
            *(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))
        ).double()
    model = shard(empty, me.size).to_empty(device="cpu")
    given = mlp().state_dict() if me.rank == 0 else {}
    scatter = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=scatter)
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


def offloaded(me: Rank) -> None:
    model = shard(mlp(), me.size, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [sharded, on_meta, offloaded])
def test_state(function, size, tmp_path):
    run(function, size, tmp_path)
