"""A user's mistake: torch's own error types, a message that says what, and nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import F16, F32, FUSED, NAMESAKES, everything, parameter
from torch.nn import Parameter

SHARED = Parameter(torch.randn(3))

# Calls of a constructor that fail in torch as well.
AS_TORCH: dict[str, Callable[[Any], Any]] = {
    "no parameters": lambda cls: cls([]),
    "empty generator": lambda cls: cls(p for p in []),
    "a tensor": lambda cls: cls(torch.randn(3)),
    "a dict": lambda cls: cls({}),
    "None": lambda cls: cls(None),
    "a number": lambda cls: cls([1.5]),
    "a string": lambda cls: cls(["weight"]),
    "nested lists": lambda cls: cls([[SHARED]]),
    "a set in a group": lambda cls: cls([{"params": {SHARED}}]),
    "group without params": lambda cls: cls([{"lr": 0.1}]),
    "not a leaf": lambda cls: cls([SHARED * 2]),
    "in two groups": lambda cls: cls([{"params": [SHARED]}, {"params": [SHARED]}]),
    "some are named": lambda cls: cls([("weight", SHARED), Parameter(torch.randn(2))]),
    "unknown argument": lambda cls: cls([SHARED], nonsense=1),
    "negative lr": lambda cls: cls([SHARED], lr=-0.1),
    "lr of two numbers": lambda cls: cls([SHARED], lr=torch.ones(2)),
    "negative weight_decay": lambda cls: cls([SHARED], weight_decay=-0.1),
    "foreach and fused": lambda cls: cls([SHARED], foreach=True, fused=True),
    "differentiable and fused": lambda cls: cls([SHARED], differentiable=True, fused=True),
}
OF_ONE: list[tuple[str, dict[str, Any]]] = [
    *[("Adam", {"betas": betas}) for betas in ((1.0, 0.9), (0.9, -0.1), (0.9, 1.5))],
    ("AdamW", {"betas": (-0.5, 0.9)}),
    ("Adam", {"betas": (0.9,)}),
    *[(name, {"eps": -1e-9}) for name in ("Adam", "AdamW", "Adagrad", "RMSprop")],
    ("SGD", {"momentum": -0.1}),
    ("SGD", {"nesterov": True}),
    ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ("Adagrad", {"lr_decay": -1.0}),
    ("Adagrad", {"initial_accumulator_value": -1.0}),
    ("RMSprop", {"alpha": -0.1}),
    ("RMSprop", {"momentum": -0.1}),
]


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Returns type and text, in which ours and torch's classes have the same name."""
    with pytest.raises(BaseException) as caught:
        call()
    return caught.type, re.sub(r"^\w+\.__init__", "__init__", str(caught.value))


@pytest.mark.parametrize("mistake", AS_TORCH)
@pytest.mark.parametrize("name", NAMESAKES)
def test_constructor_as_torch(name: str, mistake: str):
    if "fused" in mistake and name == "RMSprop":  # takes none
        return
    call = AS_TORCH[mistake]
    theirs = error_of(lambda: call(NAMESAKES[name]))
    assert error_of(lambda: call(FUSED[name])) == theirs


@pytest.mark.parametrize("mistake", [each for each in AS_TORCH if "fused" not in each])
@pytest.mark.parametrize("name", sorted(FUSED.keys() - NAMESAKES.keys()))
def test_constructor_as_torchs_adam(name: str, mistake: str):
    theirs = error_of(lambda: AS_TORCH[mistake](torch.optim.Adam))
    assert error_of(lambda: AS_TORCH[mistake](FUSED[name])) == theirs


@pytest.mark.parametrize(("name", "options"), OF_ONE, ids=str)
def test_options_as_torch(name: str, options: dict[str, Any]):
    kind, text = error_of(lambda: NAMESAKES[name]([SHARED], **options))
    found = error_of(lambda: FUSED[name]([SHARED], **options))
    if kind is IndexError:  # of a tuple that is too short; a better one will do
        assert found[0] in (IndexError, ValueError)
    else:
        assert found == (kind, text)


OURS: list[tuple[dict[str, Any], str]] = [
    ({"master": "fp16"}, "Invalid master: 'fp16': expected one of .*remainder16"),
    ({"master": True}, "Invalid master: True"),
    ({"state_dtype": F16}, "Invalid state_dtype: torch.float16"),
    ({"state_dtype": "bf16"}, "Invalid state_dtype: bf16"),
    ({"seed": -1}, "Invalid seed: -1: expected an int"),
    ({"seed": 2**64}, "Invalid seed: 18446744073709551616"),
    ({"seed": 0.5}, "Invalid seed: 0.5"),
    ({"seed": None}, "Invalid seed: None"),
]


@pytest.mark.parametrize(("options", "text"), OURS, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_our_options(name: str, options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        FUSED[name]([SHARED], **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FUSED)
def test_not_finite(name: str, value: float):
    """Every number among the hyper-parameters, at once and in a later step."""
    param = parameter(torch.randn(3))
    numbers = {
        key: (0.9, value) if key == "betas" else value
        for key, default in FUSED[name]([param]).defaults.items()
        if key == "betas" or type(default) is float
    }
    assert numbers.keys() >= {"lr", "weight_decay"}
    for key, bad in numbers.items():
        for wrapped in (bad, torch.tensor(bad)) if key == "lr" else (bad,):
            with pytest.raises(ValueError, match="Invalid"):
                FUSED[name]([param], **{key: wrapped})
        optimizer = FUSED[name]([param])
        param.grad = torch.randn(3)
        optimizer.step()
        if key == "initial_accumulator_value":  # has had its effect
            continue
        optimizer.param_groups[0][key] = bad
        before = everything(optimizer)
        with pytest.raises(ValueError, match=f"Invalid.*{'beta' if key == 'betas' else ''}"):
            optimizer.step()
        assert everything(optimizer) == before


PARAMS: list[tuple[torch.Tensor, dict[str, Any], type[Exception], str]] = [
    (torch.arange(3), {}, RuntimeError, "floating point.*int64"),
    (torch.ones(3, dtype=torch.bool), {}, RuntimeError, "floating point.*bool"),
    (torch.randn(3, dtype=torch.complex64), {}, RuntimeError, "floating point.*complex64"),
    (torch.randn(3).to(torch.float8_e5m2), {}, RuntimeError, "floating point.*float8_e5m2"),
    (torch.eye(3).to_sparse(), {}, RuntimeError, "dense params.*sparse"),
    (torch.randn(3).to(F16), {"master": "remainder16"}, ValueError, "remainder16.*bfloat16"),
    (torch.randn(3).to(F16), {"stochastic_rounding": True}, ValueError, "stochastic_rounding"),
]


@pytest.mark.parametrize(
    ("values", "options", "error", "text"),
    PARAMS,
    ids=["int64", "bool", "complex64", "float8", "sparse", "remainder16", "stochastic"],
)
@pytest.mark.parametrize("name", FUSED)
def test_parameters(
    name: str, values: torch.Tensor, options: dict[str, Any], error: type[Exception], text: str
):
    good = Parameter(torch.randn(2))
    with pytest.raises(error, match=text):
        FUSED[name]([good, Parameter(values, requires_grad=False)], **options)
    optimizer = FUSED[name]([good], **options)
    before = everything(optimizer)
    group = {"params": Parameter(values, requires_grad=False), "lr": 0.5}
    kept = dict(group)
    with pytest.raises(error, match=text):
        optimizer.add_param_group(group)
    assert everything(optimizer) == before
    assert group.keys() == kept.keys()
    assert all(group[key] is kept[key] for key in kept)
    good.grad = torch.randn(2)
    optimizer.step()
    assert everything(optimizer) != before


@pytest.mark.parametrize(
    "bad",
    [
        {"params": [SHARED * 2]},
        {"params": [SHARED], "lr": float("inf")},
        {"params": [SHARED], "lr": -1.0},
        {"params": [torch.arange(3)]},
        {"lr": 0.1},
        {"params": ["weight"]},
    ],
    ids=["not a leaf", "infinite lr", "negative lr", "integers", "no params", "a string"],
)
@pytest.mark.parametrize("name", FUSED)
def test_a_failing_constructor_leaves_the_dicts(name: str, bad: dict[str, Any]):
    params = [Parameter(torch.randn(2)) for _ in range(4)]
    named = [("weight", params[3])]
    groups = [
        {"params": params[:1]},
        {"params": params[1]},
        {"params": iter(params[2:3]), "lr": 0.5},
        bad,
    ]
    kept = [dict(group) for group in groups]
    for call in (list, iter):
        with pytest.raises((ValueError, TypeError, RuntimeError, KeyError)):
            FUSED[name](call(groups))
        for group, was in zip(groups, kept, strict=True):
            assert group.keys() == was.keys()
            assert all(group[key] is was[key] for key in was)
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError)):
        FUSED[name]([{"params": named}, bad])
    assert named == [("weight", params[3])]


@pytest.mark.parametrize("name", FUSED)
def test_a_parameter_twice(name: str):
    """torch warns only, that this will be an error."""
    param = Parameter(torch.randn(2))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="once"):
        FUSED[name]([param, param])


def test_what_is_no_mistake():
    """Generators, named parameters, groups of one tensor."""
    model = torch.nn.Linear(2, 3)
    assert len(FUSED["Adam"](model.parameters()).param_groups[0]["params"]) == 2
    named = FUSED["Adam"](model.named_parameters())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    groups = ({"params": param} for param in model.parameters())
    assert len(FUSED["Adam"](groups).param_groups) == 2
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    before = everything(named)
    named.step()
    assert everything(named) != before


@pytest.mark.parametrize("name", NAMESAKES)
def test_state_dict_of_another_model(name: str):
    """torch's errors, and the optimizer is as it was."""
    for shapes in ([(3,), (4,)], [(3,)]):
        params = [parameter(torch.randn(4, dtype=F32)) for _ in range(3)]
        texts = []
        for table in (FUSED, NAMESAKES):
            optimizer = table[name](params)
            for param in params:
                param.grad = torch.randn(4)
            optimizer.step()
            other = table[name]([parameter(torch.randn(shape)) for shape in shapes])
            before = everything(optimizer)
            saved = other.state_dict()
            texts.append(error_of(lambda o=optimizer, s=saved: o.load_state_dict(s)))
            assert everything(optimizer) == before
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", FUSED)
def test_arguments_that_are_not_there(name: str):
    param = parameter(torch.ones(3))
    with pytest.raises(TypeError, match=rf"^Fused{name}.__init__\(\) got an unexpected .*'speed'"):
        FUSED[name]([param], speed=1)


def test_precision_of_the_wrong_type():
    param = parameter(torch.ones(3))
    with pytest.raises(ValueError, match="stochastic_rounding: 'yes'"):
        FUSED["AdamW"]([param], stochastic_rounding="yes")
    with pytest.raises(ValueError, match="seed: -1: expected an int of at least 0"):
        FUSED["AdamW"]([param], seed=-1)
