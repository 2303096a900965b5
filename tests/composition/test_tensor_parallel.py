"""Tensor and sequence parallelism, alone and under FSDP2, against one process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, DIM, HEAD_DIM, LENGTH, BATCH = 36, 12, 2, 12, 4
NUM_STEPS, MAX_NORM = 3, 0.2
# Before, torch's foreach functions leave a gradient that is a sum over the ranks as it is.
FOREACH = torch.__version__ >= (2, 14)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(3))
        self.k = nn.Linear(DIM, DIM, bias=False)  # a bias has no effect, thus no gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The heads of this rank are as many as its shards have.
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(DIM, 24), nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Transformer(nn.Module):
    """One block. Norms have weights under sequence parallelism only, where they are DTensors."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        norm = functools.partial(nn.LayerNorm, DIM, elementwise_affine=affine)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.norm1, self.attention, self.norm2, self.mlp = norm(), Attention(), norm(), Mlp()
        self.norm3, self.head = norm(), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))


def make(affine: bool) -> Transformer:
    torch.manual_seed(7)
    model = Transformer(affine)
    for parameter in model.parameters():  # a norm's would be ones and zeros
        nn.init.normal_(parameter, std=0.4)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"norm{i}": SequenceParallel() for i in (1, 2, 3)},
        "attention": PrepareModuleInput(**whole),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": PrepareModuleInput(**whole),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        # Replicated on the way out of `down`, and sharded again on the way out of `mlp`.
        "mlp.down": RowwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    output = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    parallelize_module(model.mlp, mesh, output)


def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens, targets = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return tokens, targets


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    tokens, targets = batch(step, index)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    scale = theirs.abs().max().item()
    torch.testing.assert_close(
        full(ours).double(), theirs, rtol=1e-5, atol=1e-5 * scale, msg=lambda m: f"{what}: {m}"
    )


def train(model: nn.Module, reference: nn.Module, num_data: int, data_index: int) -> None:
    """A few steps of both. The reference sees the batches of all `num_data` replicas."""
    # Not Adam, which forgives a wrong scale.
    settings = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, "foreach": FOREACH}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    reference_optimizer = torch.optim.SGD(reference.parameters(), **settings)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        expected = [loss_of(reference, step, i) for i in range(num_data)]
        (sum(expected) / num_data).backward()
        with loss_parallel():
            loss = loss_of(model, step, data_index)
            loss.backward()
        assert_close(loss.detach(), expected[data_index].detach(), f"loss of step {step}")
        gradients = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert_close(parameter.grad, gradients[name].grad, f"gradient of {name}, step {step}")
        norms = [
            nn.utils.clip_grad_norm_(each.parameters(), MAX_NORM, foreach=FOREACH)
            for each in (model, reference)
        ]
        assert norms[1] > MAX_NORM, "nothing was clipped"
        assert_close(*norms, f"norm of step {step}")
        optimizer.step()
        reference_optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach(), "a parameter, at the end")


def parallel(me: Rank, style: str) -> None:
    reference = make(affine=style == "sequence")
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (me.size,))
    {"tensor": tensor_parallel, "sequence": sequence_parallel}[style](model, mesh)
    assert model.mlp.up.weight.to_local().shape == (24 // me.size, DIM)
    train(model, reference.double(), num_data=1, data_index=0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("style", ["tensor", "sequence"])
def test_tensor_parallel(style, size, tmp_path):
    run(parallel, size, tmp_path, style)


def with_fsdp(me: Rank, style: str) -> None:
    """Four ranks: two replicas of the data, each of two ranks that share the layers."""
    affine = style == "sequence"
    reference = make(affine)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    {"tensor": tensor_parallel, "sequence": sequence_parallel}[style](model, mesh["model"])
    for module in (model.attention, model.mlp, model):
        fully_shard(module, mesh=mesh["data"])
    assert model.mlp.up.weight.to_local().numel() == 24 * DIM // 4
    train(model, reference.double(), num_data=2, data_index=mesh.get_local_rank("data"))
    dist.barrier()


@pytest.mark.parametrize("style", [pytest.param("tensor", marks=pytest.mark.long), "sequence"])
def test_under_fsdp(style, tmp_path):
    run(with_fsdp, 4, tmp_path, style)
