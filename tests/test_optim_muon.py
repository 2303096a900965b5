"""Muon: beside torch's own, and beside its specification up to bfloat16's rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_gpumode import optim
from torch_gpumode.optim import naive
from torch_gpumode.optim.muon import newton_schulz

SHAPES = [(8, 20), (20, 8), (8, 20), (64, 64), (1, 7), (7, 1), (0, 5), (8, 20)]
OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "original"},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "spectral_unclamped", "momentum": 0.5},
    {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]
LR = 0.1


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for s in SHAPES]
    params[2] = nn.Parameter(torch.randn(20, 8, generator=generator).to(dtype).t())
    return params


def set_grads(*lists: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for group in zip(*lists, strict=True):
        grad = torch.randn(group[0].shape, generator=generator)
        for param in group:
            param.grad = grad.to(param.dtype)
    if step % 3 == 1:
        for params in lists:
            params[4].grad = None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_beside_torch(options):
    # Sums in bfloat16 may be made in another order in a batch.
    ours, theirs = parameters(), parameters()
    del ours[6], theirs[6]  # torch divides by zero
    a, b = optim.FusedMuon(ours, lr=LR, **options), torch.optim.Muon(theirs, lr=LR, **options)
    for step in range(4):
        set_grads(ours, theirs, step=step)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.05 * LR)
        buffers = a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"]
        torch.testing.assert_close(*buffers)
    assert a.state_dict()["state"][0].keys() == b.state_dict()["state"][0].keys()
    assert a.state_dict()["param_groups"][0].keys() == b.state_dict()["param_groups"][0].keys()
    b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_beside_the_specification(options, dtype):
    ours = parameters(dtype)
    optimizer = optim.FusedMuon(ours, lr=LR, **options)
    settings = optimizer.param_groups[0]
    right = [p.detach().double() for p in ours]
    states = [{"momentum_buffer": torch.zeros_like(p)} for p in right]
    for step in range(4):
        set_grads(ours, step=step)
        optimizer.step()
        for param, expected, state in zip(ours, right, states, strict=True):
            if param.grad is None or param.numel() == 0:
                continue
            naive.muon(expected, param.grad.double(), state, step + 1, **settings)
    for param, expected in zip(ours, right, strict=True):
        # Singular values are 1 within a half; bfloat16 changes a direction by a few hundredths.
        atol = 0.2 * LR + (0.05 if dtype == torch.bfloat16 else 0)
        torch.testing.assert_close(param.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 16, 16)])
def test_newton_schulz_is_nearly_orthogonal(shape):
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    result = newton_schulz(batch, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    for before, after in zip(batch, result, strict=True):
        values = torch.linalg.svdvals(after)
        assert 0.3 < values.min() < values.max() < 1.5
        u, _, vt = torch.linalg.svd(before, full_matrices=False)
        along = (u.T @ after @ vt.T).diagonal()
        torch.testing.assert_close(along, values.sort(descending=True).values, rtol=0.7, atol=0)
        assert (u.T @ after @ vt.T - along.diag()).abs().max() < 1e-3, "other singular vectors"


def test_refusals():
    with pytest.raises(ValueError, match="2D"):
        optim.FusedMuon([nn.Parameter(torch.randn(3))])
    with pytest.raises(ValueError, match="not supported"):
        optim.FusedMuon([nn.Parameter(torch.randn(3, 3))], adjust_lr_fn="other")
    with pytest.raises(ValueError, match="ns_steps"):
        optim.FusedMuon([nn.Parameter(torch.randn(3, 3))], ns_steps=100)
