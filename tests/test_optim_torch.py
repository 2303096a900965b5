"""Fused optimizers beside torch's own: the same arguments, results, hooks, schedulers, scaler."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import BF16, F32, F64, FUSED, NAMESAKES, Twins, bits, everything, parameter, randn
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"betas": (0.5, 0.9), "eps": 1e-4, "maximize": True}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.2, "amsgrad": True, "maximize": True}),
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("Adagrad", {"eps": 1e-3, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.9, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "maximize": True, "eps": 1e-4}),
]
# One of each, with states.
ONE_EACH = [OPTIONS[1], OPTIONS[5], OPTIONS[7], OPTIONS[10], OPTIONS[13]]


def id_of(value: Any) -> str | None:
    return None if isinstance(value, str) else str(value).strip("{}").replace("'", "")


@pytest.mark.parametrize("name", NAMESAKES)
def test_signature(name: str):
    """Every argument of torch's is ours, in its place, with the same default."""
    theirs = inspect.signature(NAMESAKES[name].__init__).parameters
    ours = inspect.signature(FUSED[name].__init__).parameters
    if name == "AdamW":  # hands the rest on to FusedAdam
        ours = {**inspect.signature(FUSED["Adam"].__init__).parameters, **ours}
    positional = [key for key, each in theirs.items() if each.kind == each.POSITIONAL_OR_KEYWORD]
    assert [*ours][: len(positional)] == positional
    for key, each in theirs.items():
        assert ours[key].default == each.default, key
    assert ours.keys() - theirs.keys() <= {"options", "precision", "decoupled_weight_decay"}


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=id_of)
def test_same_results(name: str, options: dict[str, Any], dtype: torch.dtype):
    twins = Twins(name, dtype=dtype, **options)
    for _ in range(6):
        twins.step()
    twins.check()


@pytest.mark.parametrize("key", ["foreach", "fused", "capturable"])
@pytest.mark.parametrize("name", NAMESAKES)
def test_choices_among_implementations(name: str, key: str):
    """They are taken, kept in the group, and change nothing."""
    if key not in inspect.signature(NAMESAKES["Adam" if name == "AdamW" else name]).parameters:
        return
    plain, chosen = Twins(name), Twins(name)
    chosen.ours = FUSED[name](chosen.params[0], **{key: True})
    assert chosen.ours.param_groups[0][key] is True
    for twins in (plain, chosen):
        twins.step()
    assert bits(plain.params[0]) == bits(chosen.params[0])


@pytest.mark.parametrize(("name", "options"), ONE_EACH, ids=id_of)
def test_param_groups(name: str, options: dict[str, Any]):
    """Groups have their own hyper-parameters, and one is added in the middle of a run."""
    twins = Twins(name, **options)
    extra = [[randn([6], F64, twins.generator)] for _ in range(3)]

    def add(group: dict[str, Any], values: list[torch.Tensor]) -> None:
        for params, optimizer in zip(twins.params, (twins.ours, twins.theirs), strict=True):
            made = [parameter(value.clone()) for value in values]
            params += made
            optimizer.add_param_group({"params": made, **group})

    add({"lr": 0.3, "weight_decay": 0.25}, extra[0])
    twins.step()
    add({"lr": 0.01, "maximize": True}, extra[1])
    twins.step()
    twins.step()
    add({"eps": 1e-2} if name != "SGD" else {"momentum": 0.0, "dampening": 0.0}, extra[2])
    twins.step()
    twins.check()


# What each key of a group becomes before a step.
CHANGES: dict[str, Callable[[int], Any]] = {
    "lr": lambda step: 0.1 / step,
    "weight_decay": lambda step: 0.1 * step,
    "maximize": lambda step: step % 2 == 0,
    "eps": lambda step: 10.0**-step,
    "betas": lambda step: [0.9 - 0.1 * step, 0.99],
    "momentum": lambda step: 0.9 - 0.1 * step,
    "dampening": lambda step: 0.1 * step,
    "alpha": lambda step: 1 - 0.1 * step,
    "lr_decay": lambda step: 0.1 * step,
}


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        (name, options, key)
        for name, options in ONE_EACH
        for key in sorted(CHANGES.keys() & inspect.signature(FUSED[name]).parameters.keys())
    ],
    ids=id_of,
)
def test_hyper_parameters_change(name: str, options: dict[str, Any], key: str):
    twins = Twins(name, **options)
    for step in range(1, 6):
        for optimizer in (twins.ours, twins.theirs):
            optimizer.param_groups[0][key] = CHANGES[key](step)
        twins.step()
    twins.check()


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("Adam", {}, {"amsgrad": True}),
        ("Adam", {"amsgrad": True}, {"amsgrad": False}),
        ("SGD", {"lr": 0.1}, {"momentum": 0.9}),
        ("SGD", {"lr": 0.1}, {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"nesterov": True}),
    ],
    ids=str,
)
def test_states_that_come_and_go(name: str, first: dict[str, Any], then: dict[str, Any]):
    """An option that needs another state is switched in the middle of a run."""
    twins = Twins(name, **first)
    twins.step()
    twins.step()
    for optimizer in (twins.ours, twins.theirs):
        optimizer.param_groups[0].update(then)
        if then.get("amsgrad"):  # torch has no such state then, and fails
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    for _ in range(3):
        twins.step()
    twins.check(states=False)


@pytest.mark.parametrize(("name", "options"), ONE_EACH, ids=id_of)
def test_tensor_hyper_parameters(name: str, options: dict[str, Any]):
    """lr, and Adam's betas, are tensors that change in place."""
    twins = Twins(name, **options)
    for optimizer in (twins.ours, twins.theirs):
        (group,) = optimizer.param_groups
        group.update(foreach=False, lr=torch.tensor(0.1, dtype=F64))
        if "betas" in group:
            group["betas"] = torch.tensor(0.8, dtype=F64), torch.tensor(0.9, dtype=F64)
    for _ in range(4):
        twins.step()
        for optimizer in (twins.ours, twins.theirs):
            (group,) = optimizer.param_groups
            group["lr"].mul_(0.7)
            for beta in group.get("betas", ()):
                beta.mul_(0.95)
    twins.check()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("name", "options"), [ONE_EACH[1], ONE_EACH[2]], ids=id_of)
def test_lr_scheduler(name: str, options: dict[str, Any], scheduler: str):
    twins = Twins(name, **options)
    schedulers = [SCHEDULERS[scheduler](optimizer) for optimizer in (twins.ours, twins.theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            twins.step()
            for each in schedulers:
                each.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    twins.check()


def test_reduce_on_plateau():
    twins = Twins("Adam")
    optimizers = (twins.ours, twins.theirs)
    schedulers = [lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5) for o in optimizers]
    for loss in (1.0, 1.0, 1.0, 1.0, 0.9, 1.0):
        twins.step()
        for each in schedulers:
            each.step(loss)
    assert twins.ours.param_groups[0]["lr"] == twins.theirs.param_groups[0]["lr"] < 1e-3
    twins.check()


@pytest.mark.parametrize("name", FUSED)
def test_step_hooks(name: str):
    """They are called, in order, around the update; the first may replace the arguments."""
    generator = torch.Generator().manual_seed(1)
    param = parameter(randn([5], F32, generator))
    param.grad = randn([5], F32, generator)
    optimizer = FUSED[name]([param])
    before, calls = bits(param), []
    seen = []

    def pre(opt: Any, args: Any, kwargs: Any) -> Any:
        assert opt is optimizer
        calls.append("pre")
        seen.append(bits(param) == before)
        return args, {"closure": lambda: 7.5}

    def post(opt: Any, args: Any, kwargs: Any) -> None:
        calls.append("post")
        seen.append(bits(param) == before)

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    every = register_optimizer_step_post_hook(lambda opt, args, kwargs: calls.append("all"))
    try:
        assert optimizer.step() == 7.5
    finally:
        every.remove()
    assert calls == ["pre", "post", "all"]
    assert seen == [True, False]
    for handle in handles:
        handle.remove()
    assert optimizer.step() is None
    assert len(calls) == 3


@pytest.mark.parametrize("name", FUSED)
def test_closure(name: str):
    """It runs once, with gradients enabled, and makes those that the step then takes."""
    generator = torch.Generator().manual_seed(2)
    values, target = randn([9], F32, generator), randn([9], F32, generator)
    one, other = Parameter(values.clone()), Parameter(values.clone())
    optimizers = FUSED[name]([one]), FUSED[name]([other])
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizers[0].zero_grad()
        loss = (one - target).square().sum()
        loss.backward()
        return loss

    for number in range(1, 4):
        with torch.no_grad():
            loss = optimizers[0].step(closure)
        assert calls == [True] * number
        optimizers[1].zero_grad(set_to_none=number % 2 == 0)
        expected = (other - target).square().sum()
        expected.backward()
        optimizers[1].step()
        assert loss.item() == expected.item()
        assert bits(one) == bits(other)


def test_zero_grad():
    twins = Twins("Adam")
    twins.step()
    assert all(param.grad is not None for param in twins.params[0])
    twins.ours.zero_grad(set_to_none=False)
    assert not any(param.grad.any() for param in twins.params[0])
    twins.ours.zero_grad()
    assert all(param.grad is None for param in twins.params[0])
    before = everything(twins.ours)
    twins.ours.step()
    assert everything(twins.ours) == before


@pytest.mark.parametrize("name", FUSED)
def test_autograd_notices(name: str):
    """A backward that needs the values from before the step says so, and fails."""
    param = parameter(randn([4], F32, torch.Generator().manual_seed(3)))
    loss = param.square().sum()
    param.grad = torch.ones(4)
    version = param._version
    FUSED[name]([param]).step()
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=id_of)
def test_infinities_and_nan(name: str, options: dict[str, Any]):
    """They go where they go with torch. So do large numbers, and those that are subnormal."""
    bad = [math.inf, -math.inf, math.nan, 1e15, 1e-38, 1e-42, 0.0]
    twins = Twins(name, dtype=F32, **options)
    for step in range(3):
        twins.make_grads()
        for params in twins.params:
            flat = params[4].grad
            flat[step : step + len(bad)] = torch.tensor(bad)
        twins.ours.step()
        twins.theirs.step()
    for ours, theirs in zip(*twins.params, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6, equal_nan=True)


# ------------------------------------------------------------------------------------ GradScaler


def scaled(
    twins: Twins, scaler: torch.amp.GradScaler, *, inf: bool = False, unscale: bool = False
) -> None:
    """Makes a step of our optimizer through the scaler, and one of torch's without."""
    twins.make_grads()
    scale = scaler.scale(torch.ones(()))  # as of a loss; also makes the scaler's state
    for param in twins.params[0]:
        param.grad = param.grad * scale.to(param.grad.dtype)
    if inf:
        twins.params[0][1].grad.view(-1)[3] = float("nan" if unscale else "-inf")
    before = everything(twins.ours)
    if unscale:
        scaler.unscale_(twins.ours)
        if not inf:
            for ours, theirs in zip(*twins.params, strict=True):
                assert torch.equal(ours.grad, theirs.grad)
            before = everything(twins.ours)
    scaler.step(twins.ours)
    if inf:
        after = everything(twins.ours)
        assert (after[0], after[2]) == (before[0], before[2]), "params or states were changed"
    else:
        twins.theirs.step()
        assert everything(twins.ours)[1] == before[1], "gradients were changed"
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["step unscales", "unscale_"])
@pytest.mark.parametrize(("name", "options"), ONE_EACH, ids=id_of)
def test_grad_scaler(name: str, options: dict[str, Any], unscale: bool):
    """Gradients are unscaled once. With an infinity nothing happens, the first step included."""
    twins = Twins(name, dtype=F32, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=2)
    for inf in (True, False, False, True, False):
        scaled(twins, scaler, inf=inf, unscale=unscale)
    assert scaler.get_scale() == 2.0**10  # halved, doubled, halved
    assert not {"grad_scale", "found_inf"} & set(vars(twins.ours))
    twins.check()


def test_grad_scaler_with_bfloat16_and_master():
    """Case O5, where states and the master are kept apart."""
    params = [parameter(randn([50], BF16, torch.Generator().manual_seed(4))) for _ in range(2)]
    optimizer = FUSED["AdamW"](params, master="remainder16", state_dtype=BF16)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale = scaler.scale(torch.ones(()))
    for number in range(3):
        for param in params:
            param.grad = (torch.randn(50) * scale).to(F32)
        if number == 1:
            params[0].grad[7] = float("inf")
        before = everything(optimizer)
        scaler.step(optimizer)
        assert (everything(optimizer) == before) == (number == 1)
        scaler.update(8.0)


def test_negative_squares_are_not_finite():
    """Nobody but who changes a state makes them; then a step must not look like one."""
    params = [parameter(torch.zeros(10)) for _ in range(2)]
    optimizers = [FUSED["Adam"](params[:1], lr=0.1), torch.optim.Adam(params[1:], lr=0.1)]
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.zeros(10)
        optimizer.step()
        optimizer.state[param]["exp_avg"].fill_(1.0)
        optimizer.state[param]["exp_avg_sq"].fill_(-1e-12)
        optimizer.step()
        assert param.isnan().all()
