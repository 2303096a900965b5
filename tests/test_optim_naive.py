"""Fused optimizers against their specification in float64, rounded once: every rule, option,
dtype and layout."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
import torch
from _optim import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FUSED,
    HALVES,
    assert_rounded_once,
    bits,
    exact,
    laid_out,
    num_threads,
    parameter,
    randn,
    specified,
)
from _optim_cases import FACTORS, OPTIONS, ROWS, RULES, TENSORS, is_allowed, name_of
from torch import Tensor

from torch_gpumode.optim import naive

NUM_STEPS = 7


class Run:
    """Some parameters and their optimizer, each step of which is compared."""

    def __init__(
        self, name: str, param: torch.dtype, tensors: list[Any], grad: torch.dtype, **options: Any
    ) -> None:
        text = repr((name, param, tensors, grad, options)).encode()
        self.generator = torch.Generator().manual_seed(zlib.crc32(text))
        self.dtype, self.grad_dtype = param, grad
        self.grad_layouts = [tensor[2] for tensor in tensors]
        made = [laid_out(kind, size, param, self.generator) for kind, size, _ in tensors]
        self.memory = [memory for _, memory in made]
        self.params = [parameter(values) for values, _ in made]
        half = len(made) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:], "lr": 0.07}]
        self.optimizer = FUSED[name](groups, lr=0.03, **options)
        self.counts = [0] * len(made)

    def groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups for _ in group["params"]]

    def step(self, grads: list[Tensor | None], threads: int = 1) -> None:
        before = []
        for param, grad in zip(self.params, grads, strict=True):
            param.requires_grad_(grad is not None)
            param.grad = grad
            before.append(self._values(param))
        stored = bits([self.params, [self.optimizer.state.get(p, {}) for p in self.params]])
        around = [self._around(i) for i in range(len(self.params))]
        gradients = bits(grads)
        with num_threads(threads):
            self.optimizer.step()
        assert bits(grads) == gradients, "a gradient was changed"
        for i, (param, grad, group) in enumerate(
            zip(self.params, grads, self.groups(), strict=True)
        ):
            state = self.optimizer.state.get(param, {})
            what = f"parameter {i}, {tuple(param.shape)}, strides {param.stride()}"
            assert self._around(i) == around[i], f"{what}: the memory around it was changed"
            if grad is None:
                assert bits([param, state]) == [stored[0][i], stored[1][i]], f"{what}: no gradient"
                continue
            self.counts[i] += 1
            assert state.get("step", self.counts[i]) == self.counts[i]
            self._compare(i, before[i], grad, group, what)

    def _values(self, param: Tensor) -> dict[str, Tensor]:
        """Returns the exact value and the states; those that a new parameter will have, if new."""
        state = self.optimizer.state.get(param, {})
        values = {"param": exact(param, state).clone()}
        for name, value in state.items():
            if name not in ("step", "master_param", "remainder"):
                values[name] = value.clone()
        return values

    def _compare(
        self, i: int, before: dict[str, Tensor], grad: Tensor, group: dict[str, Any], what: str
    ) -> None:
        param, state = self.params[i], self.optimizer.state[self.params[i]]
        for name in self._values(param):
            is_scalar = group.get("reg_inside_moment") is not None and name == "exp_avg_sq"
            before.setdefault(name, torch.zeros(() if is_scalar else param.shape, dtype=F64))
        computed_in = F64 if self.dtype == F64 else F32
        expected = specified(
            self.optimizer, group, before, grad, self.counts[i], computed_in, state
        )
        is_exact = "master_param" in state or "remainder" in state
        stored_in = F32 if is_exact else self.dtype
        assert_rounded_once(exact(param, state), expected.pop("param"), stored_in, what)
        assert expected.keys() <= state.keys()
        for name, value in expected.items():
            assert state[name].shape == value.value.shape
            assert_rounded_once(state[name], value, state[name].dtype, f"{what}: {name}")
        if "master_param" in state:
            assert torch.equal(param, state["master_param"].to(self.dtype)), what
        if "remainder" in state:
            whole = joined_bits(exact(param, state))
            high = param.detach().contiguous().view(torch.int16).to(torch.int64)
            assert torch.equal(((whole + 0x8000) >> 16) & 0xFFFF, high & 0xFFFF), what

    def _around(self, i: int) -> Any:
        """Returns the bits of the memory that the parameter lies in, but not in the parameter."""
        memory, param = self.memory[i].clone(), self.params[i]
        offset = param.storage_offset() - self.memory[i].storage_offset()
        memory.as_strided(param.shape, param.stride(), offset).zero_()
        return bits(memory)

    def random_grads(self, number: int) -> list[Tensor | None]:
        """Returns gradients for step `number`; some have none, each now and then."""
        grads: list[Tensor | None] = []
        for i, (param, layout) in enumerate(zip(self.params, self.grad_layouts, strict=True)):
            grad, _ = laid_out(layout, param.shape, self.grad_dtype, self.generator)
            grads.append(None if (i + 3 * number) % 5 == 0 else grad)
        return grads


def joined_bits(values: Tensor) -> Tensor:
    return values.to(F32).contiguous().view(torch.int32).to(torch.int64)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_seven_steps(row: dict[str, Any]):
    name, options = RULES[row["rule"]]
    run = Run(
        name,
        row["param"],
        TENSORS,
        row["grad"],
        state_dtype=row["state"],
        master=row["master"],
        **options,
    )
    for number in range(NUM_STEPS):
        run.step(run.random_grads(number))
    state = run.optimizer.state[run.params[3]]
    kept = {"fp32": "master_param", "remainder16": "remainder", None: None}[row["master"]]
    expected = {kept} if kept and row["param"] in HALVES else set()
    assert state.keys() & {"master_param", "remainder"} == expected
    if row["state"] is not None and row["param"] != F64:
        elementwise = [v for k, v in state.items() if k not in ("step", kept) and v.dim()]
        assert all(value.dtype == row["state"] for value in elementwise)


def test_the_rows_cover_all_pairs_and_options():
    names = list(FACTORS)
    for a, b in [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]:
        pairs = {(x, y) for x in FACTORS[a] for y in FACTORS[b] if is_allowed({a: x, b: y})}
        assert {(row[a], row[b]) for row in ROWS} >= pairs
    not_rules = {"capturable", "differentiable", "stochastic_rounding"}
    for name, table in OPTIONS.items():
        signature = inspect.signature(FUSED[name]).parameters
        default = {key: p.default for key, p in signature.items()}
        for key in default.keys() - not_rules:
            if isinstance(default[key], bool):
                assert {options.get(key, default[key]) for options in table} == {True, False}, key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_every_small_size(name: str, dtype: torch.dtype):
    """What is left over by vectors of any width is updated too."""
    tensors = [("contiguous", (numel,), "contiguous") for numel in range(1, 131)]
    run = Run(name, dtype, tensors, dtype, weight_decay=0.1)
    run.step([laid_out("contiguous", p.shape, dtype, run.generator)[0] for p in run.params])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(F32, {}), (BF16, {"master": "remainder16", "state_dtype": F32}), (F64, {}), (F16, {})],
    ids=["float32", "bfloat16", "float64", "float16"],
)
@pytest.mark.parametrize("name", FUSED)
def test_large(name: str, dtype: torch.dtype, options: dict[str, Any]):
    """Tensors that are cut into pieces, which several threads update; one that ends the list is
    empty."""
    tensors = [
        ("contiguous", (70001,), "contiguous"),
        ("slice", (131, 301), "expanded"),
        ("transposed", (257, 101), "contiguous"),
        ("contiguous", (0,), "contiguous"),
    ]
    run = Run(name, dtype, tensors, F32, weight_decay=0.1, **options)
    for number in (1, 2):
        run.step(run.random_grads(number), threads=2)


@pytest.mark.long
def test_more_elements_than_an_int():
    """Case O4. One gradient for all elements, which takes no memory."""
    numel, period = 2_359_332_864, 2**12
    values = torch.randn(period).to(BF16)
    param = parameter(values.repeat(numel // period))
    assert param.numel() == numel
    param.grad = torch.tensor(0.25, dtype=BF16).expand(numel)
    with num_threads(2):
        FUSED["SGD"]([param], lr=0.5).step()
    expected = (values.float() - 0.125).to(BF16)
    for rows in param.detach().view(-1, period).split(2**10):
        assert (rows == expected).all()


@pytest.mark.parametrize("index", range(len(RULES)), ids=lambda i: f"{RULES[i][0]}-{RULES[i][1]}")
def test_no_drift(index: int):
    """After seven steps of its own, a float32 optimizer is where the specification is."""
    name, options = RULES[index]
    generator = torch.Generator().manual_seed(index)
    param = parameter(randn([1000], F32, generator))
    optimizer = FUSED[name]([param], lr=0.01, **options)
    (group,) = optimizer.param_groups
    reference, state = param.detach().double(), {}
    initial = group.get("initial_accumulator_value", 0.0)
    for step in range(1, NUM_STEPS + 1):
        param.grad = randn([1000], F32, generator)
        optimizer.step()
        if step == 1:
            state = {
                key: torch.full_like(value, initial, dtype=F64)
                for key, value in optimizer.state[param].items()
                if key != "step"
            }
        getattr(naive, optimizer._rule)(reference, param.grad.double(), state, step, **group)
    torch.testing.assert_close(param.detach().double(), reference, rtol=1e-5, atol=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(
            optimizer.state[param][key].double(), value, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(("dtype", "off"), [(F32, 1e-4), (F64, 1e-10)], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FUSED)
def test_the_comparison_can_fail(name: str, dtype: torch.dtype, off: float):
    """A learning rate that is a little off is seen."""
    run = Run(name, dtype, [("contiguous", (1000,), "contiguous")] * 2, dtype)
    run.step(run.random_grads(1))
    before = [run._values(param) for param in run.params]
    grads = run.random_grads(1)
    for param, grad, group in zip(run.params, grads, run.groups(), strict=True):
        param.grad = grad
        group["lr"] *= 1 + off
    run.optimizer.step()
    run.counts = [count + 1 for count in run.counts]
    run._compare(0, before[0], grads[0], run.groups()[0], "parameter 0")
    for group in run.groups():
        group["lr"] /= 1 + off
    with pytest.raises(AssertionError, match="<="):
        run._compare(0, before[0], grads[0], run.groups()[0], "parameter 0")
