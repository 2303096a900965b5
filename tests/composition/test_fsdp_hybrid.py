"""FSDP2 on a mesh: sharded in one dimension, replicated in the other; and unlike, failing ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, batch, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import torch_gpumode.distributed as gd


def shard(model: nn.Sequential, mesh: DeviceMesh, **settings: object) -> nn.Sequential:
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(me: Rank) -> None:
    """By sums in float64, and by averages in float32."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = shard(mlp(dtype=dtype), square())
        train(model, sgd(model), me.rank)
        assert_same(model, train_alone(mlp(), me.size), tolerance)


def hybrid_with_a_factor(me: Rank) -> None:
    """PREMUL_SUM in one dimension, SUM in the other."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        model = shard(mlp(), square(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        for module in (model[0], model[2], model):
            module.set_gradient_divide_factor(3.0)
        loss_of(model, me.rank).backward()
        reference = mlp()
        for rank in range(me.size):
            (loss_of(reference, rank) / 3).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            atol = tolerance * theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=atol)


def accumulate_in_shards(me: Rank) -> None:
    """Only the last of three backwards reduces over the replicas; all reduce over the shards."""
    model, reference = shard(mlp(), square()), mlp()
    ours, theirs = sgd(model), sgd(reference)
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        for part in range(3):
            model.set_requires_all_reduce(part == 2)
            loss_of(model, me.rank, 3 * step + part).backward()
            for rank in range(me.size):
                (loss_of(reference, rank, 3 * step + part) / me.size).backward()
        ours.step(), theirs.step()
    assert_same(model, reference)


def reshard_to_pairs(me: Rank) -> None:
    """After the forward two ranks hold a whole, of four that share it before."""
    mesh = init_device_mesh("cpu", (4,))
    model = shard(mlp(), mesh, reshard_after_forward=2)
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


def two_models_on_two_halves(me: Rank) -> None:
    """Each half of the world trains a model of its own."""
    mesh = square()["shard"]
    half = me.rank // 2
    model = shard(mlp(seed=half), mesh)
    train(model, sgd(model), me.rank % 2)
    assert_same(model, train_alone(mlp(seed=half), 2))
    dist.barrier()


@pytest.mark.parametrize(
    "function",
    [
        hybrid,
        hybrid_with_a_factor,
        accumulate_in_shards,
        reshard_to_pairs,
        two_models_on_two_halves,
    ],
)
def test_mesh(function, tmp_path):
    run(function, 4, tmp_path)


class Uneven(nn.Module):
    """Only some ranks use the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.middle = mlp(seed=1)[2]

    def forward(self, inputs: torch.Tensor, with_middle: bool) -> torch.Tensor:
        hidden = self.net[1](self.net[0](inputs))
        second = self.net[2](hidden)
        if with_middle:
            second = second + self.middle(hidden)
        return self.net[4](self.net[3](second))


def use_on_some_ranks(me: Rank) -> None:
    model, reference = Uneven(), Uneven()
    for module in (model.net[0], model.net[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (me.size,)))
    model.set_reduce_scatter_unused_params(True)
    ours, theirs = sgd(model), sgd(reference)

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return (module(inputs, rank == step % me.size) - targets).square().mean()

    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        loss(model, me.rank, step).backward()
        for rank in range(me.size):
            (loss(reference, rank, step) / me.size).backward()
        ours.step(), theirs.step()
    assert_same(model, reference)


def go_on_after_a_failure(me: Rank) -> None:
    """Rank 1 fails between two all-gathers of its forward; all rebuild, and repeat the step."""
    model = shard(mlp(), init_device_mesh("cpu", (me.size,)))
    optimizer = sgd(model)
    failing = False

    def fail(*_: object) -> None:
        if failing:
            raise ArithmeticError("a batch that cannot be trained on")

    model[1].register_forward_hook(fail)
    for step in range(4):
        optimizer.zero_grad()
        failing = me.rank == 1 and step in (0, 2)
        try:
            loss_of(model, me.rank, step).backward()
        except (ArithmeticError, dist.DistBackendError):
            assert step in (0, 2)
            failing = False
            gd.rebuild(timeout=timedelta(seconds=20))
            model.reset_iter_state()
            loss_of(model, me.rank, step).backward()
        optimizer.step()
    assert_same(model, train_alone(mlp(), me.size, steps=4))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("function", "needs"),
    [
        (use_on_some_ranks, "set_reduce_scatter_unused_params"),
        (go_on_after_a_failure, "reset_iter_state"),
    ],
)
def test_unlike_ranks(function, needs, size, tmp_path):
    if not hasattr(FSDPModule, needs):
        pytest.skip("newer than this torch")
    run(function, size, tmp_path, timeout_s=600, limit_s=30)
