"""A small model, the batches that each rank trains it on, and what one process makes of them all.

In float64 throughout: what differs from the reference by more than a few roundings is wrong.
"""

from __future__ import annotations

import torch
from torch import nn


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Returns the same weights on every rank. Neither 2, 3 nor 4 divides a size of theirs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)]
        return nn.Sequential(*layers).to(dtype)


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Returns inputs and targets that every rank can make."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    return (model(inputs) - targets).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam's, its step shows when gradients are summed and not averaged."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def train_alone(model: nn.Module, ranks: int, steps: int = 3) -> nn.Module:
    """The reference: every step averages the gradients of all ranks' batches."""
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rank, step) / ranks).backward()
        optimizer.step()
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of a DTensor, or the tensor itself, detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    """Compares the parameters; the tolerance is relative to the largest of each tensor."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        expected = theirs.detach().double()
        torch.testing.assert_close(
            whole(ours).double(),
            expected,
            rtol=0,
            atol=tolerance * expected.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )
