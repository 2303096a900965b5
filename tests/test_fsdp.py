"""Case B1: FSDP2 on CPU averages gradients, which is AVG or PREMUL_SUM, in every dtype it uses."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from _ranks import Rank, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_and_step(me: Rank, dtype: torch.dtype, factor: float | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    reference = copy.deepcopy(model).to(torch.float64)
    mesh = init_device_mesh("cpu", (me.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=dtype)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        if factor is not None:
            layer.set_gradient_divide_factor(factor)

    inputs = [torch.randn(4, 7, generator=torch.Generator().manual_seed(r)) for r in range(me.size)]
    model(inputs[me.rank]).square().sum().backward()
    for each in inputs:
        reference(each.double()).square().sum().backward()
    divisor = factor if factor is not None else me.size
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-5}.get(dtype, 2e-2)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        expected = theirs.grad / divisor
        torch.testing.assert_close(
            ours.grad.full_tensor().double(),
            expected,
            rtol=tolerance,
            atol=tolerance * expected.abs().max().item(),
        )


def every_dtype(me: Rank) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for factor in (None, 3.0):
            shard_and_step(me, dtype, factor)


def test_fsdp(tmp_path):
    run(every_dtype, 2, tmp_path)


def hybrid(me: Rank) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    weight = model.weight.detach().clone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    model(inputs[me.rank]).sum().backward()
    expected = torch.stack([x.sum(0).expand_as(weight) for x in inputs]).mean(0)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected)
    dist.barrier()


def test_hybrid(tmp_path):
    run(hybrid, 4, tmp_path)
