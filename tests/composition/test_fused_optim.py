"""Fused optimizers on shards (FSDP2, HSDP, tensor parallel, mixed groups) do what one process does.

In float64, with sizes that the number of ranks does not divide, so that shards differ, and some are
empty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _models import loss_of, mlp, whole
from _ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_gpumode import optim

OPTIMIZERS: list[tuple[type[optim.FusedOptimizer], dict[str, Any]]] = [
    (optim.FusedAdam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    (optim.FusedAdamW, {"lr": 0.1}),
    (optim.FusedSGD, {"lr": 0.3, "momentum": 0.9, "nesterov": True}),
    (optim.FusedAdagrad, {"lr": 0.1}),
    (optim.FusedRMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    (optim.FusedLion, {"lr": 0.01}),
    (optim.FusedLAMB, {"lr": 0.1}),
    (optim.FusedNovoGrad, {"lr": 0.1, "weight_decay": 0.1}),
]
STEPS = 4


def train_whole(model: nn.Module, optimizer: optim.FusedOptimizer, ranks: int, **step: Any) -> None:
    """The reference: every step averages the gradients of all ranks' batches."""
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rank, number) / ranks).backward()
        optimizer.step(**step)


def train_part(model: nn.Module, optimizer: optim.FusedOptimizer, rank: int, **step: Any) -> None:
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step(**step)


def check_equal(model: nn.Module, reference: nn.Module) -> None:
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), right.detach(), rtol=1e-9, atol=1e-12)


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def fsdp(me: Rank, max_norm: float | None) -> None:
    for kind, options in OPTIMIZERS:
        model = shard(mlp(), init_device_mesh("cpu", (me.size,)))
        reference = mlp()
        ours = kind(model.parameters(), **options)
        right = kind(reference.parameters(), **options)
        train_part(model, ours, me.rank, max_norm=max_norm)
        train_whole(reference, right, me.size, max_norm=max_norm)
        check_equal(model, reference)
        if max_norm is not None:
            torch.testing.assert_close(ours.grad_norm, right.grad_norm)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("size", [2, 4])
def test_fsdp(size, max_norm, tmp_path):
    run(fsdp, size, tmp_path, max_norm)


def hybrid(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, me.size // 2), mesh_dim_names=("replicate", "shard"))
    for kind, options in OPTIMIZERS:
        model, reference = shard(mlp(), mesh), mlp()
        train_part(model, kind(model.parameters(), **options), me.rank, max_norm=0.1)
        train_whole(reference, kind(reference.parameters(), **options), me.size, max_norm=0.1)
        check_equal(model, reference)


def test_hybrid(tmp_path):
    run(hybrid, 4, tmp_path)


def divisible() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def tensor_parallel(me: Rank) -> None:
    """The last layer stays a plain tensor, in the same group."""
    mesh = init_device_mesh("cpu", (me.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for kind, options in OPTIMIZERS:
        model, reference = divisible(), divisible()
        parallelize_module(model, mesh, plan)
        ours = kind(model.parameters(), **options)
        right = kind(reference.parameters(), **options)
        for number in range(STEPS):
            for each, optimizer in ((model, ours), (reference, right)):
                optimizer.zero_grad()
                loss_of(each, 0, number).backward()
                optimizer.step(max_norm=0.1)
        check_equal(model, reference)


def test_tensor_parallel_and_plain_in_one_group(tmp_path):
    run(tensor_parallel, 2, tmp_path)


def muon(me: Rank) -> None:
    """Its matrices are gathered; biases have AdamW. bfloat16 may round otherwise in a batch."""
    model, reference = shard(mlp(), init_device_mesh("cpu", (me.size,))), mlp()
    optimizers = []
    for each in (model, reference):
        matrices = [p for p in each.parameters() if p.ndim == 2]
        others = [p for p in each.parameters() if p.ndim != 2]
        optimizers.append([optim.FusedMuon(matrices, lr=0.1), optim.FusedAdamW(others, lr=0.01)])
    for number in range(STEPS):
        for optimizer in (*optimizers[0], *optimizers[1]):
            optimizer.zero_grad()
        loss_of(model, me.rank, number).backward()
        for rank in range(me.size):
            (loss_of(reference, rank, number) / me.size).backward()
        for optimizer in (*optimizers[0], *optimizers[1]):
            optimizer.step()
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), right.detach(), rtol=0, atol=0.01)


def test_muon(tmp_path):
    run(muon, 3, tmp_path)


def attached(me: Rank) -> None:
    model, reference = shard(mlp(), init_device_mesh("cpu", (me.size,))), mlp()
    ours = optim.FusedAdamW(model.parameters(), lr=0.1)
    right = optim.FusedAdamW(reference.parameters(), lr=0.1)
    with optim.attach(ours, model, bucket_nbytes=100):
        for number in range(STEPS):
            loss_of(model, me.rank, number).backward()
            assert all(p.grad is None for p in model.parameters())
    train_whole(reference, right, me.size)
    check_equal(model, reference)
    parallel = nn.parallel.DistributedDataParallel(mlp())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        optim.attach(optim.FusedAdamW(parallel.parameters()), parallel)


def test_attached(tmp_path):
    run(attached, 3, tmp_path)


def eight_bits(me: Rank) -> None:
    """Each rank packs its shard; checkpoints have DTensors of float32."""
    torch.manual_seed(0)
    model = nn.Linear(100, 300, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (me.size,)))
    param = model.weight
    optimizer = optim.FusedAdamW(model.parameters(), state_dtype=torch.uint8)
    for _ in range(2):
        model(torch.randn(4, 100)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[param]["exp_avg"].dtype == torch.uint8
    saved = optimizer.state_dict()
    kept = saved["state"][0]["exp_avg"]
    assert isinstance(kept, DTensor)
    assert kept.shape == param.shape
    assert kept.placements == param.placements
    again = optim.FusedAdamW(model.parameters(), state_dtype=torch.uint8)
    again.load_state_dict(saved)
    for key, value in again.state_dict()["state"][0].items():
        assert torch.equal(whole(value), whole(saved["state"][0][key]))
    param.grad = torch.zeros_like(param)
    again.step()
    assert again.state[param]["exp_avg"].dtype == torch.uint8


def test_states_of_8_bits(tmp_path):
    run(eight_bits, 2, tmp_path)
