"""Steps inside backward give what steps after it give, and leave no gradients."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_gpumode import optim

KINDS: list[tuple[type[optim.FusedOptimizer], dict[str, Any]]] = [
    (optim.FusedAdamW, {"lr": 0.01, "amsgrad": True}),
    (optim.FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (optim.FusedLAMB, {"lr": 0.01}),
    (optim.FusedNovoGrad, {"lr": 0.01}),
]


class Net(nn.Module):
    """Its last layer is not always used; its first is twice, and once within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 4)
        self.sometimes = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, use_last: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.first, x, use_reentrant=False)
        x = self.second(x)
        return self.frozen(self.sometimes(x) if use_last else x)


def batches(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 6, generator=generator) for _ in range(num)]


def assert_same_training(a: nn.Module, a_opt: Any, b: nn.Module, b_opt: Any) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        state, other = a_opt.state.get(p, {}), b_opt.state.get(q, {})
        assert state.keys() == other.keys()
        assert all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("nbytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_same_as_a_step_after_backward(kind, options, nbytes):
    torch.manual_seed(3)
    model = Net()
    reference = copy.deepcopy(model)
    ours, right = kind(model.parameters(), **options), kind(reference.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 2, gamma=0.5)
    right_scheduler = torch.optim.lr_scheduler.StepLR(right, 2, gamma=0.5)
    with optim.attach(ours, model, bucket_nbytes=nbytes):
        for number, x in enumerate(batches(7)):
            model(x, use_last=number % 3 != 0).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
            ours.step()  # has nothing to do, but schedulers look for it
            scheduler.step()
            right.zero_grad()
            reference(x, use_last=number % 3 != 0).square().mean().backward()
            right.step()
            right_scheduler.step()
            assert_same_training(model, ours, reference, right)


def test_random_bits_are_those_of_a_step_after_backward():
    torch.manual_seed(3)
    model = Net().bfloat16()
    reference = copy.deepcopy(model)
    ours = optim.FusedAdamW(model.parameters(), stochastic_rounding=True, seed=9)
    right = optim.FusedAdamW(reference.parameters(), stochastic_rounding=True, seed=9)
    optim.attach(ours, model, bucket_nbytes=1)
    for x in batches(4):
        model(x.bfloat16(), use_last=True).square().mean().backward()
        right.zero_grad()
        reference(x.bfloat16(), use_last=True).square().mean().backward()
        right.step()
    assert_same_training(model, ours, reference, right)


def test_detach_leaves_gradients_again():
    model = Net()
    ours = optim.FusedSGD(model.parameters(), lr=0.1)
    handle = optim.attach(ours, model)
    handle.detach()
    handle.detach()
    before = [p.clone() for p in model.parameters()]
    model(batches(1)[0], use_last=True).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert all(map(torch.equal, before, model.parameters()))


def test_state_that_is_loaded_meanwhile():
    torch.manual_seed(3)
    model = Net()
    ours = optim.FusedAdamW(model.parameters(), lr=0.01)
    optim.attach(ours, model)
    first, second, third = batches(3)
    model(first, use_last=True).sum().backward()
    saved = copy.deepcopy((model.state_dict(), ours.state_dict()))
    model(second, use_last=True).sum().backward()
    expected = [p.clone() for p in model.parameters()]
    model(third, use_last=True).sum().backward()
    model.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    model(second, use_last=True).sum().backward()
    assert all(map(torch.equal, expected, model.parameters()))


def test_a_backward_that_raises_is_forgotten():
    torch.manual_seed(3)
    model, x = Net(), batches(1)[0]
    ours = optim.FusedSGD(model.parameters(), lr=0.1)
    optim.attach(ours, model, bucket_nbytes=1 << 20)
    hook = model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, use_last=True).sum().backward()
    hook.remove()
    model.zero_grad()
    before = model.first.weight.clone()
    model(x, use_last=False).sum().backward()
    assert not torch.equal(before, model.first.weight)
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_that_only_the_optimizer_has():
    model, other = Net(), nn.Parameter(torch.randn(3))
    ours = optim.FusedSGD([*model.parameters(), other], lr=0.1)
    optim.attach(ours, model)
    before = other.clone()
    (model(batches(1)[0], use_last=True).sum() + other.sum()).backward()
    assert torch.equal(before, other)
    ours.step()
    torch.testing.assert_close(other, before - 0.1)


def test_refusals():
    model = Net()
    ours = optim.FusedSGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer"):
        optim.attach(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(ValueError, match="none of its parameters"):
        optim.attach(ours, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bucket_nbytes"):
        optim.attach(ours, model, bucket_nbytes=0)
    optim.attach(ours, model)
    with pytest.raises(ValueError, match="already"):
        optim.attach(ours, model.first)


@pytest.mark.parametrize("argument", ["max_norm", "scaler"])
def test_what_needs_all_gradients_is_refused(argument: str):
    model = nn.Linear(3, 2)
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1)
    value = {"max_norm": 1.0, "scaler": torch.amp.GradScaler("cpu")}[argument]
    with optim.attach(optimizer, model):
        model(torch.randn(4, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=f"^{argument}: the optimizer is attached"):
            optimizer.step(**{argument: value})
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step(max_norm=1.0)


def test_a_scheduler_does_not_warn():
    model = nn.Linear(3, 2)
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with optim.attach(optimizer, model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 3)).sum().backward()
        scheduler.step()
