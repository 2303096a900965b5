"""Checkpoints of fused optimizers: to and from torch's own, files, pickles, old ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import BF16, F16, F32, F64, FUSED, NAMESAKES, Twins, bits, parameter, randn
from torch.distributed.checkpoint import state_dict as dcp

from torch_gpumode import optim
from torch_gpumode.optim import _precision

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"lr": 0.02}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("Adagrad", {"initial_accumulator_value": 0.2, "lr_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "file": through_file}


def id_of(value: Any) -> str | None:
    return None if isinstance(value, str) else str(value).strip("{}").replace("'", "")


def tensors(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [parameter(randn(shape, dtype, generator)) for shape in [(9,), (4, 5), (130,)]]


def saved_bits(optimizer: torch.optim.Optimizer) -> Any:
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group.pop("differentiable", None)  # torch adds it to optimizers that were unpickled
    return bits(state_dict)


def run(optimizer: torch.optim.Optimizer, params: list[Any], steps: range) -> None:
    """Makes steps whose gradients depend on their number only; the last parameter has few."""
    for step in steps:
        for i, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + i)
            param.grad = randn(param.shape, F32, generator)
        if step % 3:
            params[-1].grad = None
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", ["to torch", "from torch"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=id_of)
def test_state_dict_both_ways(name: str, options: dict[str, Any], direction: str, way: str):
    """Halfway each goes on from what the other has saved, in a new optimizer of its own."""
    twins = Twins(name, **options)
    for _ in range(3):
        twins.step()
    ours, theirs = twins.ours.state_dict(), twins.theirs.state_dict()
    saved = WAYS[way](ours if direction == "to torch" else theirs)
    kept = bits(saved)
    if direction == "to torch":
        twins.theirs = NAMESAKES[name](twins.params[1], lr=99.0)
        twins.theirs.load_state_dict(saved)
        twins.theirs.param_groups[0]["foreach"] = False
    else:
        twins.ours = FUSED[name](twins.params[0], lr=99.0)
        twins.ours.load_state_dict(saved)
    assert bits(saved) == kept
    for _ in range(3):
        twins.step()
    twins.check()
    assert twins.ours.param_groups[0]["lr"] == twins.theirs.param_groups[0]["lr"] != 99.0


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=id_of)
def test_the_same_keys(name: str, options: dict[str, Any]):
    """A checkpoint has what torch's has, and no more: groups, states, numbers of the same dtype."""
    twins = Twins(name, dtype=F32, **options)
    twins.step()
    ours, theirs = twins.ours.state_dict(), twins.theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for group, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert group == {**other, "foreach": None}

    def kinds(states: dict[int, dict[str, Any]]) -> dict[int, Any]:
        return {
            index: {key: (value.dtype, value.shape) for key, value in state.items()}
            for index, state in states.items()
        }

    assert kinds(ours["state"]) == kinds(theirs["state"])


KINDS = [
    {},
    {"dtype": BF16, "state_dtype": BF16, "stochastic_rounding": True, "seed": 5},
    {"dtype": BF16, "master": "remainder16"},
    {"dtype": F16, "master": "fp32", "state_dtype": BF16},
    {"dtype": F64, "maximize": True},
]


@pytest.mark.parametrize("way", [*WAYS, "pickle", "deepcopy of all"])
@pytest.mark.parametrize("kind", KINDS, ids=id_of)
@pytest.mark.parametrize("name", FUSED)
def test_resume(name: str, kind: dict[str, Any], way: str):
    """A run that was saved, and one that goes on from there, end in the same bits."""
    options = {key: value for key, value in kind.items() if key != "dtype"}
    params = tensors(1, kind.get("dtype", F32))
    optimizer = FUSED[name](params, lr=0.02, **options)
    run(optimizer, params, range(4))
    if way in WAYS:
        others = [parameter(param.detach().clone()) for param in params]
        resumed = FUSED[name](others, **options)
        resumed.load_state_dict(WAYS[way](optimizer.state_dict()))
    elif way == "pickle":
        resumed = pickle.loads(pickle.dumps(optimizer))
        others = resumed.param_groups[0]["params"]
        for other in others:
            other.grad_dtype = None
    else:
        others, resumed = copy.deepcopy((params, optimizer))
        assert others[0] is resumed.param_groups[0]["params"][0]
        for other in others:
            other.grad = None
            other.grad_dtype = None
    assert type(resumed) is type(optimizer)
    assert saved_bits(resumed) == saved_bits(optimizer)
    before = (bits(params), saved_bits(optimizer))
    run(resumed, others, range(4, 8))
    if way not in WAYS or way == "file":
        assert (bits(params), saved_bits(optimizer)) == before, "they share memory"
    run(optimizer, params, range(4, 8))
    assert (bits(others), saved_bits(resumed)) == (bits(params), saved_bits(optimizer))


@pytest.mark.parametrize("loaded", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_states_keep_their_dtype(dtype: torch.dtype, loaded: torch.dtype):
    """Case O6. torch casts states to the parameter's dtype when it loads them."""
    params = tensors(2, dtype)
    optimizer = FUSED["AdamW"](params, lr=0.02)
    run(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(loaded)
    optimizer.load_state_dict(saved)
    for steps in (range(0), range(1, 3)):
        run(optimizer, params, steps)
        for param in params:
            state = optimizer.state[param]
            assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (loaded, loaded)
            assert state["step"].dtype == F32


@pytest.mark.parametrize("form", ["int", "float", "one element", "int64", "float64"])
@pytest.mark.parametrize(
    ("name", "options"), [each for each in OPTIONS if each[0] != "SGD"], ids=id_of
)
def test_old_step(name: str, options: dict[str, Any], form: str):
    """Old checkpoints have the step as a number, or in other tensors."""
    make: Callable[[int], Any] = {
        "int": int,
        "float": float,
        "one element": lambda step: torch.full((1,), float(step)),
        "int64": lambda step: torch.tensor(step),
        "float64": lambda step: torch.tensor(step, dtype=F64),
    }[form]
    twins = Twins(name, **options)
    for _ in range(3):
        twins.step()
    saved = copy.deepcopy(twins.ours.state_dict())
    for state in saved["state"].values():
        state["step"] = make(3)
    twins.ours = FUSED[name](twins.params[0])
    twins.ours.load_state_dict(saved)
    for _ in range(3):
        twins.step()
    twins.check()
    for param in twins.params[0]:
        step = twins.ours.state[param]["step"]
        assert (step.dtype, step.shape, step.item()) == (F32, (), 6.0)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=id_of)
def test_missing_keys(name: str, options: dict[str, Any]):
    """A checkpoint from before an option existed has what its constructor was told."""
    twins = Twins(name, **options)
    twins.step()
    saved = copy.deepcopy(twins.theirs.state_dict())
    for group in saved["param_groups"]:
        for key in (
            *("maximize", "foreach", "capturable", "differentiable", "fused", "nesterov"),
            *("decoupled_weight_decay", "amsgrad"),
        ):
            if key in group and key not in options:
                del group[key]
    twins.ours = FUSED[name](twins.params[0], **options)
    twins.ours.load_state_dict(saved)
    assert twins.ours.param_groups[0].keys() >= twins.ours.defaults.keys()
    twins.step()
    twins.check()
    again = pickle.loads(pickle.dumps(twins.ours))
    assert again.param_groups[0].keys() == twins.ours.param_groups[0].keys()


def test_adamw_stays_adamw():
    """Its checkpoints from before the key existed are not those of an Adam."""
    twins = Twins("AdamW", weight_decay=0.3)
    twins.step()
    saved = copy.deepcopy(twins.theirs.state_dict())
    saved["param_groups"][0]["decoupled_weight_decay"] = False
    twins.ours.load_state_dict(saved)
    twins.step()
    twins.check()


def test_master_after_a_checkpoint_of_torch():
    """A checkpoint without a master makes one from the parameter, in the next step."""
    params = tensors(3, BF16)
    theirs = torch.optim.AdamW(params, foreach=False)
    for param in params:
        param.grad = torch.randn(param.shape).to(BF16)
    theirs.step()
    for master, key in (("fp32", "master_param"), ("remainder16", "remainder")):
        optimizer = FUSED["AdamW"](params, master=master)
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        optimizer.step()
        assert all(key in optimizer.state[param] for param in params)


def test_hooks():
    """Those of state_dict and load_state_dict see plain tensors, before and after."""
    params = tensors(4, F32)
    optimizer = FUSED["AdamW"](params)
    run(optimizer, params, range(1))
    seen = []

    def look(what: str, state: dict[Any, Any]) -> None:
        kinds = {type(value) for each in state.values() for value in each.values()}
        seen.append((what, kinds))

    def double(state_dict: dict[str, Any]) -> dict[str, Any]:
        look("load pre", state_dict["state"])
        states = {
            index: {**state, "exp_avg": 2 * state["exp_avg"]}
            for index, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    optimizer.register_state_dict_pre_hook(lambda o: look("save pre", o.state))
    optimizer.register_state_dict_post_hook(lambda o, s: look("save post", s["state"]))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: double(s))
    optimizer.register_load_state_dict_post_hook(lambda o: look("load post", o.state))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    expected = ["save pre", "save post", "load pre", "load post"]
    assert seen == [(what, {torch.Tensor}) for what in expected]
    for index, param in enumerate(params):
        doubled = 2 * saved["state"][index]["exp_avg"]
        assert torch.equal(optimizer.state[param]["exp_avg"], doubled)
    optimizer.load_state_dict(saved)  # our own hooks were not left behind
    assert len(seen) == 6


@pytest.mark.parametrize("name", FUSED)
def test_distributed_checkpoint(name: str):
    """torch.distributed.checkpoint names states by parameter; it makes them by a step of lr 0."""
    torch.manual_seed(7)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)) for _ in range(2)]
    optimizers = [FUSED[name](model.parameters(), lr=0.02) for model in models]
    run(optimizers[0], list(models[0].parameters()), range(0, 7, 3))
    models[1].load_state_dict(models[0].state_dict())
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(models[0], optimizers[0]))
    before = bits(list(models[1].parameters()))
    dcp.set_optimizer_state_dict(models[1], optimizers[1], saved)
    assert bits(list(models[1].parameters())) == before
    for model, optimizer in zip(models, optimizers, strict=True):
        run(optimizer, list(model.parameters()), range(9, 16, 3))
    params = [list(model.parameters()) for model in models]
    assert bits(params[0]) == bits(params[1])
    assert saved_bits(optimizers[0]) == saved_bits(optimizers[1])


@pytest.mark.parametrize("then", [None, "fp32", "remainder16"])
@pytest.mark.parametrize("first", [None, "fp32", "remainder16"])
def test_masters_of_another_kind(first: str | None, then: str | None):
    """The exact value goes on from one kind to the other; nothing stays of a kind not wanted."""
    names = {"fp32": "master_param", "remainder16": "remainder"}
    generator = torch.Generator().manual_seed(0)
    values = randn([300], BF16, generator)
    param, exact = parameter(values), parameter(values.float())
    optimizer = optim.FusedSGD([param], lr=1e-3, master=first)
    reference = optim.FusedSGD([exact], lr=1e-3)
    for _ in range(7):
        exact.grad = randn([300], F32, generator)
        param.grad = exact.grad.clone()
        optimizer.step()
        reference.step()
    other = parameter(param.detach().clone())
    resumed = optim.FusedSGD([other], lr=1e-3, master=then)
    resumed.load_state_dict(optimizer.state_dict())
    other.grad = torch.zeros(300)
    resumed.step()
    kept = resumed.state[other]
    assert set(kept) & set(names.values()) == ({names[then]} if then else set())
    if first is None or then is None:
        assert torch.equal(other, param)
        return
    now = (
        kept["master_param"]
        if then == "fp32"
        else _precision.master_of(other.detach(), kept["remainder"])
    )
    assert ((now - exact).abs() <= exact.abs() * 2.0**-23).all()


def test_remainder_of_a_parameter_that_others_wrote():
    high = torch.tensor([1.0, -1.0, 2.0], dtype=BF16)
    master = torch.tensor([1.001, -1.001, 3.0])
    rest = _precision.remainder_of(high, master)
    assert torch.equal(_precision.master_of(high, rest), torch.tensor([1.001, -1.001, 2.0]))
