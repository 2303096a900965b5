"""Clipping and unscaling: alone as torch's clip_grad_norm_, and inside the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from torch_gpumode import optim

INF = float("inf")


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """With gradients; one has none, one is a column of another tensor, one has no element."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    params = [nn.Parameter(draw(*shape)) for shape in [(1000,), (7, 5), (), (3, 4), (0, 3), (9,)]]
    params.append(nn.Parameter(draw(20_000, 2)[:, 1]))
    for param in params[:-2]:
        param.grad = draw(*param.shape)
    params[3].grad = draw(4, 3).t()
    params[-1].grad = draw(1).expand(20_000)
    return params


def grads(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.clone() for p in params if p.grad is not None]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e4, INF])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_clip_grad_norm(dtype, max_norm):
    params = parameters(dtype)
    params[-1].grad = params[-1].grad.clone()  # nobody can scale an expanded tensor in place
    before = [g.double() for g in grads(params)]
    norm = torch.cat([g.flatten() for g in before]).norm()
    returned = optim.clip_grad_norm_(params, max_norm)
    assert returned.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(returned.double(), norm, rtol=1e-6, atol=0)
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for after, was in zip(grads(params), before, strict=True):
        torch.testing.assert_close(after, (was * factor).to(dtype))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, INF])
def test_other_norms_are_torchs(norm_type):
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[4].grad = None  # what is the largest of no elements?
        params[-1].grad = params[-1].grad.clone()
    returned = optim.clip_grad_norm_(ours, 0.5, norm_type)
    assert torch.equal(returned, nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    assert all(map(torch.equal, grads(ours), grads(theirs)))


def test_one_tensor_and_none():
    param = parameters()[0]
    before = param.grad.clone()
    optim.clip_grad_norm_(param, 0.5)
    torch.testing.assert_close(param.grad, before * 0.5 / before.norm())
    assert optim.clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_norm_that_is_not_finite(bad):
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[-1].grad = params[-1].grad.clone()
        params[0].grad[7] = bad
    before = grads(ours)
    with pytest.raises(RuntimeError, match="non-finite"):
        optim.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    for after, was in zip(grads(ours), before, strict=True):
        assert torch.equal(after.nan_to_num(), was.nan_to_num())
    returned = optim.clip_grad_norm_(ours, 1.0)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(returned.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))
    for after, right in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(after, right, equal_nan=True)


@pytest.mark.parametrize("max_norm", [0.5, 1e4, INF])
def test_step_clips_and_leaves_gradients(max_norm):
    ours, reference = parameters(), parameters()
    reference[-1].grad = reference[-1].grad.clone()
    a, b = optim.FusedAdamW(ours, lr=0.1), optim.FusedAdamW(reference, lr=0.1)
    for _ in range(3):
        before = grads(ours)
        a.step(max_norm=max_norm)
        assert all(map(torch.equal, before, grads(ours)))
        kept = copy.deepcopy([p.grad for p in reference])
        norm = nn.utils.clip_grad_norm_(reference, max_norm)
        b.step()
        for param, grad in zip(reference, kept, strict=True):
            param.grad = grad
        exact = torch.cat([g.double().flatten() for g in before]).norm()
        torch.testing.assert_close(a.grad_norm.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(a.grad_norm, norm, rtol=1e-4, atol=0)
        for p, q in zip(ours, reference, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)  # its norm is less exact


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_bad_max_norm(max_norm):
    params = parameters()
    before = copy.deepcopy(params)
    with pytest.raises(ValueError, match="max_norm"):
        optim.FusedSGD(params, lr=0.1).step(max_norm=max_norm)
    assert all(map(torch.equal, before, params))


def train(how: str, overflows: set[int], max_norm: float | None) -> tuple[Any, ...]:
    """Six steps with a GradScaler; returns parameters, states and scales."""
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(3, 5))]
    kind = torch.optim.AdamW if how == "torch" else optim.FusedAdamW
    optimizer: Any = kind(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = sum((p.square() * (step + 1)).sum() for p in params)
        scaler.scale(loss * INF if step in overflows else loss).backward()
        if how in ("torch", "unscale"):
            scaler.unscale_(optimizer)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(params, max_norm)
            scaler.step(optimizer)
        elif how == "unscale, then ours":
            scaler.unscale_(optimizer)
            optimizer.step(scaler=scaler, max_norm=max_norm)
        elif how == "scaler.step":
            scaler.step(optimizer, max_norm=max_norm)
        else:
            optimizer.step(scaler=scaler, max_norm=max_norm)
        scaler.update()
        scales.append(scaler.get_scale())
    states = [optimizer.state[p] for p in params]
    return params, states, scales


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("overflows", [set(), {0}, {2, 3}], ids=str)
@pytest.mark.parametrize("how", ["unscale", "unscale, then ours", "scaler.step", "ours"])
def test_with_a_scaler(how, overflows, max_norm):
    params, states, scales = train(how, overflows, max_norm)
    right_params, right_states, right_scales = train("torch", overflows, max_norm)
    assert scales == right_scales
    for ours, right in zip(params, right_params, strict=True):
        torch.testing.assert_close(ours, right)
    for ours, right in zip(states, right_states, strict=True):
        assert ours["step"] == right["step"] == 6 - len(overflows)
        torch.testing.assert_close(ours["exp_avg_sq"], right["exp_avg_sq"])


def test_infinite_gradients_change_nothing():
    params = parameters()
    optimizer = optim.FusedAdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    params[0].grad[3] = INF
    before = copy.deepcopy((params, optimizer.state_dict()))
    optimizer.step(scaler=scaler)
    assert all(map(torch.equal, before[0], params))
    assert optimizer.state_dict() == before[1], "not even a state was made"
    with pytest.raises(RuntimeError, match="already been called"):
        optimizer.step(scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_a_scaler_and_a_closure():
    params = parameters()
    optimizer = optim.FusedAdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="Closure use"):
        optimizer.step(lambda: 0.0, scaler=scaler)
    assert optimizer.step(lambda: 7.0, scaler=torch.amp.GradScaler("cpu", enabled=False)) == 7.0
