"""Fused optimizers on DTensors on CUDA, of one rank: the same as on plain tensors.

Meshes of several ranks are in composition/test_fused_optim.py, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_gpumode import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)).cuda()


def sharded() -> nn.Sequential:
    model = mlp()
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cuda", (1,)))
    return model


def backward(model: nn.Module, number: int) -> None:
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(number)).cuda()
    model(x).square().mean().backward()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(model: nn.Module, reference: nn.Module) -> None:
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(whole(ours), right.detach())


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("LAMB", {}), ("NovoGrad", {})],
)
def test_fsdp(name: str, options: dict[str, Any], max_norm: float | None):
    models = sharded(), mlp()
    optimizers = [
        getattr(optim, f"Fused{name}")(model.parameters(), lr=0.1, **options) for model in models
    ]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step(max_norm=max_norm)
    check_equal(*models)
    if max_norm is not None:
        torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm)


def test_nothing_waits_for_the_device():
    model = sharded()
    plain = nn.Parameter(torch.randn(5, device="cuda"))
    optimizer = optim.FusedAdamW([*model.parameters(), plain], lr=0.1)
    for number in range(3):
        backward(model, number)
        plain.grad = torch.randn_like(plain)
        torch.cuda.set_sync_debug_mode("error" if number > 0 else "default")
        try:
            optimizer.step(max_norm=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_attached():
    models = sharded(), mlp()
    optimizers = [optim.FusedAdamW(model.parameters(), lr=0.1) for model in models]
    with optim.attach(optimizers[0], models[0], bucket_nbytes=100):
        for number in range(3):
            backward(models[0], number)
            assert all(param.grad is None for param in models[0].parameters())
    for number in range(3):
        optimizers[1].zero_grad()
        backward(models[1], number)
        optimizers[1].step()
    check_equal(*models)
