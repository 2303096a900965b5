"""torch.ops.gpumode: schemas, fakes, values against the specification, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import BF16, F16, F32, F64, FUSED, bits, parameter, randn
from torch import Tensor

import torch_gpumode.ops  # noqa: F401  (defines them)
from torch_gpumode import _extension
from torch_gpumode.optim import FusedOptimizer, naive

SHAPES = [(7,), (5, 6), (), (2, 3, 4), (0, 3), (300,)]

# name, options of the groups, and of the optimizer
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("Adam", [{"weight_decay": 0.1}, {"amsgrad": True, "lr": 0.2}], {}),
    ("AdamW", [{"maximize": True}, {"betas": (0.5, 0.6)}], {"amsgrad": True}),
    ("SGD", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}], {"lr": 0.1}),
    ("SGD", [{}, {"weight_decay": 0.3}], {"lr": 0.1}),
    ("Adagrad", [{"lr_decay": 0.5}, {}], {"initial_accumulator_value": 0.5}),
    ("RMSprop", [{"centered": True}, {"momentum": 0.5}, {}], {}),
    ("Lion", [{"weight_decay": 0.3}, {"betas": (0.5, 0.8)}], {"lr": 0.1}),
    ("LAMB", [{}, {"weight_decay": 0.0, "use_nvlamb": True}], {}),
    ("NovoGrad", [{"reg_inside_moment": True, "weight_decay": 0.1}, {"init_zero": True}], {}),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


class Call:
    """The arguments of an op for one step of an optimizer, whose states exist already."""

    def __init__(
        self,
        name: str,
        groups: list[dict[str, Any]],
        options: dict[str, Any],
        dtypes: tuple[torch.dtype, ...] = (F64,),
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        params = []
        for i, shape in enumerate(SHAPES):
            params.append(parameter(randn(shape, dtypes[i % len(dtypes)], self.generator)))
        parts = [params[i :: len(groups)] for i in range(len(groups))]
        named = [{"params": part, **group} for part, group in zip(parts, groups, strict=True)]
        self.optimizer: FusedOptimizer = FUSED[name](named, **options)
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.groups = [i for i, part in enumerate(parts) for _ in part]
        self.make_grads()
        self.optimizer.step()  # makes the states, so that no step here is the first
        self.make_grads()
        self.op = getattr(torch.ops.gpumode, f"{self.optimizer._rule}_").default
        self.args, self.kwargs = self._arguments()

    def make_grads(self) -> None:
        for param in self.params:
            param.grad = randn(param.shape, param.dtype, self.generator)

    def group_of(self, i: int) -> dict[str, Any]:
        return self.optimizer.param_groups[self.groups[i]]

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        optimizer = self.optimizer
        names = _extension.load().hyper_of_rule(optimizer._rule)
        rows = []
        for group in optimizer.param_groups:
            by_name = optimizer._hyper(group)
            rows.append([float(by_name[name]) for name in names])
        states, masters, scalars, present, steps = [], [], [], [], []
        for i, param in enumerate(self.params):
            kept = optimizer.state[param]
            names_of_states = optimizer._state_names(self.group_of(i))
            states += [kept[name] for name in names_of_states if name]
            present.append(sum(2**k for k, name in enumerate(names_of_states) if name))
            masters += [kept[name] for name in ("master_param", "remainder") if name in kept]
            scalars += [kept["exp_avg_sq"]] if optimizer._has_scalar else []
            steps.append(kept.get("step", torch.tensor(1.0)))
        precision = optimizer.precision
        args = {
            "params": self.params,
            "grads": [param.grad for param in self.params],
            "states": states,
            "masters": masters,
            "steps": steps,
            "scalars": scalars,
            "hyper": torch.tensor(rows, dtype=F64),
            "groups": self.groups,
        }
        return args, {
            "present": present,
            "master": precision.master,
            "stochastic": precision.stochastic_rounding,
            "seed": precision.seed,
        }

    def run(self, **changed: Any) -> None:
        with torch.no_grad():
            self.op(**{**self.args, **self.kwargs, **changed})

    def everything(self) -> Any:
        """Returns a copy of all that the op was given."""
        return bits([self.args, self.kwargs])


def specified(call: Call, factor: float = 1.0) -> list[tuple[Tensor, dict[str, Any]]]:
    """Returns the parameters and states that the specification makes of a call's, in float64."""
    results = []
    for i, param in enumerate(call.params):
        values = dict(call.optimizer.state[param])
        state = {key: value.double() for key, value in values.items() if key != "step"}
        after = param.detach().double().clone()
        rule = getattr(naive, call.optimizer._rule)
        rule(after, param.grad.double() * factor, state, 2, **call.group_of(i))
        results.append((after, state))
    return results


def check_against(call: Call, expected: list[tuple[Tensor, dict[str, Any]]]) -> None:
    for param, (value, state) in zip(call.params, expected, strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=1e-11, atol=1e-13)
        for name in [key for key in state if call.optimizer.state[param][key].dtype == F64]:
            kept = call.optimizer.state[param][name]
            torch.testing.assert_close(kept, state[name], rtol=1e-11, atol=1e-13)
        if "exp_avg_sq" in state and call.optimizer._has_scalar:
            kept = call.optimizer.state[param]["exp_avg_sq"].double()
            torch.testing.assert_close(kept, state["exp_avg_sq"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "groups", "options"), CASES, ids=IDS)
def test_values(name: str, groups: list[dict[str, Any]], options: dict[str, Any]):
    call = Call(name, groups, options)
    expected = specified(call)
    call.run()
    check_against(call, expected)


@pytest.mark.parametrize(("name", "groups", "options"), CASES, ids=IDS)
def test_opcheck(name: str, groups: list[dict[str, Any]], options: dict[str, Any]):
    call = Call(name, groups, options)
    with torch.no_grad():
        torch.library.opcheck(call.op, tuple(call.args.values()), call.kwargs)


@pytest.mark.parametrize("master", [None, "fp32", "remainder16"])
def test_opcheck_in_half_precision(master: str | None):
    options = {"master": master, "stochastic_rounding": master is None, "seed": 2**63 - 1}
    dtypes = (BF16, F32) if options["stochastic_rounding"] or master else (BF16, F16)
    call = Call("AdamW", [{}, {"amsgrad": True}], options, dtypes)
    more = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}
    total = {"grad_sum": torch.tensor(3.0, dtype=F64), "max_norm": 0.5}
    with torch.no_grad():
        torch.library.opcheck(call.op, tuple(call.args.values()), {**call.kwargs, **more, **total})


def test_opcheck_of_grad_sum():
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        grads = [randn(shape, dtype, generator) for dtype in (F32, BF16, F64)]
        op = torch.ops.gpumode.grad_sum.default
        torch.library.opcheck(op, (grads,))
        torch.library.opcheck(op, (grads, torch.tensor(4.0)))


def test_each_rule_has_an_op():
    """All but that of Muon, between whose passes matrices are multiplied."""
    for each in FUSED.values():
        assert hasattr(torch.ops.gpumode, f"{each._rule}_")
    assert not hasattr(torch.ops.gpumode, "muon_")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({"master": "fp32"}, (BF16, F16, F32, F64)),
        ({"master": "remainder16"}, (F32, BF16)),
        ({"stochastic_rounding": True, "state_dtype": BF16, "seed": 5}, (BF16, F32)),
    ],
    ids=["fp32", "remainder16", "stochastic"],
)
def test_bits_of_the_optimizer(name: str, options: dict[str, Any], dtypes: Any):
    """An op and the optimizer's own step are the same, to each bit."""
    call, other = (Call(name, [{"lr": 0.1}, {"lr": 0.3}], options, dtypes) for _ in range(2))
    before = bits(call.params)
    call.run()
    other.optimizer.step()
    assert bits(call.params) != before
    assert bits(call.params) == bits(other.params)
    assert bits(call.optimizer.state_dict()) == bits(other.optimizer.state_dict())


def test_numbers_choose_random_bits():
    options = {"stochastic_rounding": True}
    calls = [Call("SGD", [{}], options, (BF16,)) for _ in range(3)]
    for call, numbers in zip(calls, (None, [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]), strict=True):
        call.run(numbers=numbers)
    assert bits(calls[0].params) == bits(calls[1].params)
    assert bits(calls[0].params) != bits(calls[2].params)


def test_states_need_not_be_named():
    """Without `present`, each parameter has the first of the rule's states."""
    call, other = (Call("AdamW", [{}], {}) for _ in range(2))
    before = bits(call.params)
    call.run(present=None)
    other.run()
    assert bits(call.params) != before
    assert bits(call.params) == bits(other.params)


def test_strides():
    """A transposed parameter, an expanded gradient, a state that is a slice."""
    call = Call("AdamW", [{}], {})
    generator = torch.Generator().manual_seed(2)
    param = parameter(randn((4, 5), F64, generator).t())
    grad = randn((1, 4), F64, generator).expand(5, 4)
    states = [randn((10, 8), F64, generator).abs()[::2, 1::2] for _ in range(2)]
    state = dict(zip(("exp_avg", "exp_avg_sq"), (s.clone() for s in states), strict=True))
    after = param.detach().clone()
    naive.adam(after, grad, state, 4, **call.optimizer.param_groups[0])
    call.run(
        params=[param],
        grads=[grad],
        states=states,
        steps=[torch.tensor(3.0)],
        groups=[0],
        present=None,
    )
    close = {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(param.detach(), after, **close)
    torch.testing.assert_close(states[0], state["exp_avg"], **close)
    torch.testing.assert_close(states[1], state["exp_avg_sq"], **close)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB", "NovoGrad"])
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_scaling_and_clipping(name: str, max_norm: float):
    call = Call(name, [{}, {}], {"lr": 0.1})
    norm = torch.stack([param.grad.norm() for param in call.params]).norm() / 8
    expected = specified(call, min(1.0, max_norm / (norm.item() + 1e-6)) / 8)
    scale = torch.tensor(8.0)
    total = torch.ops.gpumode.grad_sum(call.args["grads"], scale)
    torch.testing.assert_close(total, norm**2)
    call.run(grad_scale=scale, grad_sum=total, max_norm=max_norm)
    check_against(call, expected)


@pytest.mark.parametrize("name", FUSED)
def test_found_inf_changes_nothing(name: str):
    call = Call(name, [{}, {}], {})
    before = call.everything()
    call.run(found_inf=torch.tensor(1.0))
    assert call.everything() == before
    call.run(found_inf=torch.tensor(0.0))
    assert call.everything() != before


def test_autograd_notices():
    call = Call("AdamW", [{}], {"master": "fp32"}, (BF16,))
    changed = [t for name in ("params", "states", "masters", "steps") for t in call.args[name]]
    versions = [tensor._version for tensor in changed]
    call.run()
    assert all(t._version > was for t, was in zip(changed, versions, strict=True))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        call.op(**call.args, **call.kwargs)
    total = torch.ops.gpumode.grad_sum([call.params[0]])
    with pytest.raises(RuntimeError, match="not implemented"):
        total.backward()


def test_nothing_to_update():
    call = Call("AdamW", [{}], {})
    nothing: dict[str, Any] = {key: [] for key in ("params", "grads", "states", "steps", "groups")}
    before = call.everything()
    call.run(**nothing, present=None)
    call.run(**nothing, present=[])
    assert call.everything() == before


# ------------------------------------------------------------------------------------- bad input


def without_last(key: str) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {key: (call.args | call.kwargs)[key][:-1]}


def replaced(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Call], dict[str, Any]]:
    return lambda call: {key: [change(call.args[key][0]), *call.args[key][1:]]}


def given(**arguments: Any) -> Callable[[Call], dict[str, Any]]:
    return lambda call: arguments


BAD: list[tuple[str, type[Exception], str, Callable[[Call], dict[str, Any]]]] = [
    (
        "grads",
        ValueError,
        r"grads: expected 6, one for each of params, got 5",
        without_last("grads"),
    ),
    ("steps", ValueError, r"steps: expected 6", without_last("steps")),
    ("groups", ValueError, r"groups: expected 6", without_last("groups")),
    (
        "states",
        ValueError,
        r"states: expected 12, as `present` says, got 11",
        without_last("states"),
    ),
    ("masters", ValueError, r"masters: expected 6", without_last("masters")),
    ("present", ValueError, r"present: expected 6", without_last("present")),
    ("numbers", ValueError, r"numbers: expected 6.*got 1", given(numbers=[3])),
    ("bit", ValueError, r"present: expected less than 8", given(present=[8] * 6)),
    (
        "uneven",
        ValueError,
        r"states: expected as many",
        lambda call: {"present": None, "states": call.args["states"][:-1]},
    ),
    ("scalars", ValueError, r"scalars: adam has none", given(scalars=[torch.tensor(1.0)])),
    (
        "group",
        ValueError,
        r"groups: expected rows of hyper, which has 1, got 1",
        given(groups=[0, 0, 0, 0, 0, 1]),
    ),
    ("negative", ValueError, r"groups: expected rows", given(groups=[0, 0, -1, 0, 0, 0])),
    (
        "hyper",
        ValueError,
        r"hyper: expected float64 of shape \[num_groups, at least 8\]",
        given(hyper=torch.rand(1, 7, dtype=F64)),
    ),
    ("dtype", ValueError, r"hyper: expected float64", given(hyper=torch.rand(1, 8))),
    ("master", ValueError, r'master: expected None, "fp32" or', given(master="fp16")),
    (
        "max_norm",
        ValueError,
        r"max_norm: expected a number of at least 0, and grad_sum",
        given(max_norm=1.0),
    ),
    (
        "below 0",
        ValueError,
        r"max_norm: .* got -1",
        given(max_norm=-1.0, grad_sum=torch.tensor(1.0)),
    ),
    ("nan", ValueError, r"max_norm: ", given(max_norm=float("nan"), grad_sum=torch.tensor(1.0))),
    (
        "scale",
        ValueError,
        r"grad_scale: expected one number, got 2",
        given(grad_scale=torch.rand(2)),
    ),
    ("inf", ValueError, r"found_inf: expected one number, got 0", given(found_inf=torch.rand(0))),
    (
        "sum",
        ValueError,
        r"grad_sum: expected one number",
        given(max_norm=1.0, grad_sum=torch.rand(3)),
    ),
    ("step", ValueError, r"steps: expected one number of Float", replaced("steps", Tensor.double)),
    (
        "shape",
        RuntimeError,
        r"gradient of a parameter of shape \[7\]",
        replaced("grads", lambda grad: grad[:-1]),
    ),
    ("integer", RuntimeError, r"gradient .* is of Int", replaced("grads", Tensor.int)),
    ("sparse", RuntimeError, r"sparse gradients", replaced("grads", Tensor.to_sparse)),
    (
        "state",
        RuntimeError,
        r"state of a parameter of shape",
        replaced("states", lambda state: state[:3]),
    ),
    (
        "expanded",
        RuntimeError,
        r"shares memory with itself",
        replaced("states", lambda state: state[:1].expand(7)),
    ),
    ("copy", RuntimeError, r"master of a parameter", replaced("masters", Tensor.half)),
]


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [bad[1:] for bad in BAD],
    ids=[bad[0] for bad in BAD],
)
def test_bad_input_changes_nothing(
    kind: type[Exception], message: str, arguments: Callable[[Call], dict[str, Any]]
):
    call = Call("AdamW", [{}], {"master": "fp32"}, (BF16,))
    before = call.everything()
    with pytest.raises(kind, match=message):
        call.run(**arguments(call))
    assert call.everything() == before


def test_lists_are_checked_by_the_fake_too():
    call = Call("NovoGrad", [{}], {})
    with pytest.raises(ValueError, match="scalars: expected 6"):
        call.run(
            **{
                key: [t.to("meta") for t in call.args[key]] for key in ("params", "grads", "states")
            },
            scalars=[],
        )


def test_bad_input_of_grad_sum():
    op = torch.ops.gpumode.grad_sum
    with pytest.raises(ValueError, match="grad_scale: expected one number, got 2"):
        op([torch.rand(3)], torch.rand(2))
    with pytest.raises(RuntimeError, match="sparse"):
        op([torch.rand(3).to_sparse()])


def test_sum_of_an_expanded_gradient():
    grad = torch.randn(1, 100).expand(3, 100)
    found = torch.ops.gpumode.grad_sum([grad], None)
    torch.testing.assert_close(found, grad.double().square().sum())
