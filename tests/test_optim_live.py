"""What changes between compiled steps: hyper-parameters, groups, states, parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _compiled import Pair
from _optim import BF16, F32, F64, Twins, bits, parameter, randn
from test_optim_user_changes import CHANGES, RULES, same_random
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from torch_gpumode.optim import FusedOptimizer
from torch_gpumode.optim._groups import LiveHyper, tensor_entries


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


# --------------------------------------------------------------------------------- hyper-parameters


def test_numbers_move():
    """In each group, by each way to change a dict; nothing is compiled again."""
    pair = Pair("AdamW", (F32, F64), "aot_eager")
    pair.step()
    for i in range(1, 5):
        for optimizer in pair.optimizers:
            first, second = optimizer.param_groups
            first["lr"] = 0.1 / i
            first["betas"] = (0.9 - 0.1 * i, 0.5 + 0.1 * i)
            second.update(weight_decay=0.05 * i, eps=1e-3 / i)
            second |= {"lr": 0.2 + i}
            second["maximize"] = i % 2 == 0
        pair.step()
    assert pair.num_graphs == 1


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: LambdaLR(optimizer, [lambda i: 0.5**i, lambda i: 1 / (1 + i)]),
        lambda optimizer: OneCycleLR(optimizer, [0.1, 0.3], total_steps=20),
    ],
    ids=["LambdaLR", "OneCycleLR"],
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_schedulers(name: str, scheduler: Callable[[Any], Any]):
    pair = Pair(name, **({"momentum": 0.9} if name == "SGD" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as that a step was not seen by the scheduler
        schedulers = pair.change(scheduler)
        rates = set()
        for _ in range(5):
            pair.step()
            rates.add(pair.compiled.param_groups[1]["lr"])
            for each in schedulers:
                each.step()
    assert len(rates) == 5
    assert pair.num_graphs == 1


def test_numbers_that_are_tensors():
    """They are read when the graph runs."""
    pair = Pair("AdamW", (F32, F64), "aot_eager", lr=torch.tensor(0.1))
    for optimizer in pair.optimizers:
        optimizer.param_groups[1]["betas"] = (torch.tensor(0.8), torch.tensor([0.9], dtype=F64))
        optimizer.param_groups[1]["lr"] = torch.tensor([0.3])
    schedulers = pair.change(lambda optimizer: LambdaLR(optimizer, lambda i: 0.5**i))
    for i in range(4):
        pair.step()
        for optimizer, each in zip(pair.optimizers, schedulers, strict=True):
            optimizer.param_groups[1]["betas"][0].fill_(0.7 - 0.1 * i)
            optimizer.param_groups[1]["betas"][1].mul_(0.9)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            each.step()
    assert pair.num_graphs == 1


def test_a_number_becomes_a_tensor():
    pair = Pair("AdamW")
    pair.step()
    for value in (torch.tensor(0.5), torch.tensor(0.75), 0.25, torch.tensor(0.125)):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = copy.deepcopy(value)
        pair.step()
        for optimizer in pair.optimizers:
            if isinstance(value, Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.7)
        pair.step()


@pytest.mark.parametrize(
    ("name", "options", "change"),
    [
        ("AdamW", {}, {"amsgrad": True}),
        ("SGD", {"lr": 0.1}, {"momentum": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.5}, {"momentum": 0.0}),
        ("RMSprop", {}, {"centered": True, "momentum": 0.5}),
    ],
)
def test_states_that_a_change_needs(name: str, options: dict[str, Any], change: dict[str, Any]):
    pair = Pair(name, **options)
    pair.step()
    pair.change(lambda optimizer: optimizer.param_groups[1].update(change))
    for _ in range(3):
        pair.step()
    assert pair.num_graphs == 2


def test_group_is_added():
    pair = Pair("AdamW")
    pair.step()
    for optimizer, params in zip(pair.optimizers, pair.params, strict=True):
        params.append(parameter(same_random(params[1].detach())))
        optimizer.add_param_group({"params": params[-1:], "lr": 0.5})
    for i in range(3):
        pair.step()
        pair.change(lambda optimizer, i=i: optimizer.param_groups[2].update(lr=0.1 * i))
    assert pair.num_graphs == 2


def test_group_is_removed():
    pair = Pair("AdamW")
    pair.step()
    pair.change(lambda optimizer: optimizer.param_groups.pop())
    before = bits(pair.params[1])
    for _ in range(2):
        pair.make_grads()
        pair.eager.step()
        pair.run()
    assert bits(pair.params[1]) == bits(pair.params[0]) != before
    assert bits(pair.params[1])[3:] == before[3:]
    assert pair.num_graphs == 2


BAD_VALUES = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": float("nan")}, "Invalid lr: nan"),
    ({"betas": (0.5, 1.5)}, "Invalid beta parameter at index 1: 1.5"),
    ({"betas": (0.5,)}, "expected two numbers"),
    ({"weight_decay": torch.tensor(-0.5)}, "Invalid weight_decay"),
    ({"lr": 0.5, "eps": float("inf")}, "Invalid eps"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VALUES)
def test_bad_values_are_refused_where_they_are_set(change: dict[str, Any], message: str):
    pair = Pair("AdamW")
    pair.step()
    group = pair.compiled.param_groups[1]
    before = bits(dict(group))
    with pytest.raises(ValueError, match=message):
        group.update(change)
    key, value = list(change.items())[-1]
    with pytest.raises(ValueError, match=message):
        group[key] = value
    assert bits(dict(group)) == before
    pair.step()


def test_bad_value_before_the_first_step():
    """Nothing is compiled with it; when it is put right, all is well."""
    pair = Pair("AdamW")
    pair.compiled.param_groups[0]["lr"] = -1.0
    pair.make_grads()
    before = bits(pair.params[1])
    with pytest.raises(Exception, match=r"Invalid learning rate: -1\.0"):
        pair.run()
    assert bits(pair.params[1]) == before
    pair.compiled.param_groups[0]["lr"] = 1e-3
    pair.step()


def test_what_may_wait_for_another_is_set_together():
    pair = Pair("SGD", lr=0.1)
    pair.step()
    pair.change(lambda o: o.param_groups[0].update(nesterov=True, momentum=0.9))
    pair.step()
    with pytest.raises(ValueError, match="Nesterov"):
        pair.compiled.param_groups[0]["momentum"] = 0.0
    assert pair.compiled.param_groups[0]["momentum"] == 0.9


def test_live_hyper():
    """What kernels read, without a compiled step."""
    lr = torch.tensor(0.25)
    optimizer = Pair("AdamW").compiled
    optimizer.param_groups[1]["lr"] = lr
    live = optimizer._live = LiveHyper(optimizer)
    live.is_in_graph = True
    tensor = live.tensor(torch.device("cpu"))
    assert live.tensor(torch.device("cpu")) is tensor
    assert (tensor.dtype, tensor.shape) == (F64, (2, 10))
    assert tensor[:, :5].tolist() == [[lr, 0.9, 0.999, 1e-8, 0.01] for lr in (1e-3, 0.25)]
    assert [entry[:2] for entry in tensor_entries(optimizer)] == [(1, 0)]
    optimizer.param_groups[0]["lr"] = 0.5
    assert tensor[:, 0].tolist() == [0.5, 0.25]
    lr.fill_(0.125)
    assert tensor[:, 0].tolist() == [0.5, 0.25]
    live.refresh()
    assert tensor[:, 0].tolist() == [0.5, 0.125]
    lr.fill_(-1.0)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        live.refresh()
    assert tensor[:, 0].tolist() == [0.5, 0.125]
    lr.fill_(2.0)
    optimizer.add_param_group({"params": [parameter(torch.randn(3))], "lr": 0.75})
    assert live.tensor(torch.device("cpu"))[:, 0].tolist() == [0.5, 2.0, 0.75]


def test_groups_are_dicts():
    """That nobody compiled: pickled and copied as plain ones, and then those of the copy."""
    pair = Pair("AdamW")
    pair.step()
    optimizer = pair.compiled
    group = optimizer.param_groups[0]
    assert type(pickle.loads(pickle.dumps(group))) is dict
    assert type(copy.deepcopy(group)) is dict
    assert group.setdefault("lr", 5.0) == 1e-3
    assert group.setdefault("mine", 5.0) == group["mine"] == 5.0
    other = copy.deepcopy(optimizer)
    other.param_groups[0]["lr"] = 7.0
    assert optimizer.param_groups[0]["lr"] == 1e-3
    loaded = pickle.loads(pickle.dumps(optimizer))
    loaded.param_groups[0]["lr"] = -7.0  # not compiled
    pair.eager.param_groups[0]["mine"] = 5.0
    pair.step()


def test_copies_are_compiled_on_their_own():
    pair = Pair("AdamW", amsgrad=True)
    pair.step()
    others = pair.change(copy.deepcopy)
    run = torch.compile(others[1].step, backend="eager", fullgraph=True)
    for i in range(3):
        for optimizer in others:
            optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)
            generator = torch.Generator().manual_seed(i)
            for param in optimizer.param_groups[0]["params"]:
                param.grad = randn(param.shape, F32, generator)
        others[0].step()
        run()
        assert bits(others[0].state_dict()) == bits(others[1].state_dict())
        assert bits(others[0].param_groups[0]["params"]) == bits(
            others[1].param_groups[0]["params"]
        )
    pair.step()


# ------------------------------------------------------------------------------- what users change


# Of a rule that saves no step, what has to do with its state.
SAVES_STEP, SAVES_NONE = RULES[:2]
OF_STATES = ("replace_values", "empty_state", "delete_state", "delete_all", "new_dict")
ALL = [(SAVES_STEP, c) for c in CHANGES]
ALL += [(SAVES_NONE, c) for c in CHANGES if c.__name__ in OF_STATES]


@pytest.mark.parametrize(
    ("rule", "change"), ALL, ids=[f"{rule[0]}-{change.__name__}" for rule, change in ALL]
)
def test_change(rule: tuple[str, dict[str, Any], str], change: Callable[..., None]):
    name, options, state = rule
    twins = Twins(name, **options)
    for params, optimizer in zip(twins.params, (twins.ours, twins.theirs), strict=True):
        params.append(parameter(same_random(params[3].detach())))  # of the same shape as another
        optimizer.add_param_group({"params": params[-1:]})
    ours = twins.ours
    run = torch.compile(lambda: ours.step(), backend="eager", fullgraph=True)

    def step() -> None:
        twins.make_grads()
        run()
        twins.theirs.step()

    step()
    step()
    change(twins.ours, twins.params[0], state)
    change(twins.theirs, twins.params[1], state)
    for _ in range(3):
        step()
        twins.check()


def test_load_state_dict():
    """Goes on from what is loaded, in the graph that there is."""
    pair = Pair("AdamW", (BF16, F32), master="fp32", amsgrad=True)
    pair.step()
    saved = copy.deepcopy(pair.eager.state_dict())
    pair.step()
    saved["param_groups"][1]["lr"] = 0.5
    pair.change(lambda optimizer: optimizer.load_state_dict(copy.deepcopy(saved)))
    for i in range(3):
        pair.step()
        pair.change(lambda optimizer, i=i: optimizer.param_groups[1].update(lr=0.1 * i))
    assert pair.num_graphs == 1


def test_one_function_for_several_optimizers():
    pairs = [Pair("AdamW", lr=0.1), Pair("AdamW", lr=0.3), Pair("SGD", lr=0.1)]

    def step(optimizer: FusedOptimizer) -> None:
        optimizer.step()

    run = torch.compile(step, backend="eager", fullgraph=True)
    for _ in range(2):
        for pair in pairs:
            pair.make_grads()
            pair.eager.step()
            run(pair.compiled)
            pair.check()
