"""Optimizers, tensors of every layout, and the specification with a bound of its rounding."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_gpumode import optim
from torch_gpumode.optim import FusedOptimizer, naive

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = (F32, BF16, F16, F64)
HALVES = (BF16, F16)
# Those whose rules are for tensors of any shape.
FUSED: dict[str, type[FusedOptimizer]] = {
    name: getattr(optim, f"Fused{name}")
    for name in ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "NovoGrad", "RMSprop", "SGD")
}
UNIT = {F32: 2.0**-24, F64: 2.0**-53}  # of one rounding, relative
TINY = {F32: 2.0**-150, F64: 2.0**-1075}  # of one rounding among subnormals


# --------------------------------------------------------------------------------------- tensors


def randn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), dtype=F64, generator=generator).to(dtype)


def laid_out(
    layout: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns random values of that layout, and the random memory that they lie in."""
    numel = torch.Size(shape).numel()
    if layout == "contiguous":
        memory = randn([numel], dtype, generator)
        return memory.view(shape), memory
    if layout == "misaligned":
        memory = randn([numel + 4], dtype, generator)
        return memory[1 : numel + 1].view(shape), memory
    if layout == "slice":  # with gaps in each dimension, before and after
        memory = randn([2 * size + 3 for size in shape], dtype, generator)
        return memory[tuple(slice(1, 2 * size + 1, 2) for size in shape)], memory
    if layout == "transposed":
        memory = randn(shape[::-1], dtype, generator)
        return memory.permute(*reversed(range(len(shape)))), memory
    if layout == "channels_last":
        batch, channels, *rest = shape
        memory = randn([batch, *rest, channels], dtype, generator)
        return memory.movedim(-1, 1), memory
    assert layout == "expanded"
    memory = randn([1, *shape[1:]], dtype, generator)
    return memory.expand(*shape), memory


def parameter(values: Tensor) -> Parameter:
    """Returns a parameter that lies where `values` lie, and takes gradients of any dtype."""
    made = Parameter(values)
    made.grad_dtype = None
    return made


def bits(value: Any) -> Any:
    """Returns a copy that equals another only if each bit does."""
    if isinstance(value, Tensor):
        if value.device.type == "meta" or value.is_sparse:
            return str(value)
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), tuple(value.stride()), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(kept) for key, kept in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return copy.copy(value)


def everything(optimizer: torch.optim.Optimizer, *more: Any) -> Any:
    """Returns a copy of all that a step might change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return bits([params, [param.grad for param in params], optimizer.state_dict(), *more])


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------- the master weights


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns the float32 that a bfloat16 and its remainder are together."""
    high = param.detach().contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.contiguous().to(torch.int32)).view(F32)


def exact(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Returns the exact value of a parameter, in float64."""
    if "master_param" in state:
        return state["master_param"].double()
    if "remainder" in state:
        return joined(param, state["remainder"]).double()
    return param.detach().double()


# ------------------------------------------------------------------------- running error analysis


class Bounded:
    """A number that is computed in float64, and a bound of its error if computed in `dtype`.

    Each operation hands on the errors of its operands, and adds that of one rounding. So the
    specification itself, which is given these in place of tensors, says how far a result may be
    from its own.
    """

    def __init__(self, value: Tensor, error: Tensor | float, dtype: torch.dtype) -> None:
        self.value = value
        self.error = torch.as_tensor(error, dtype=F64).expand(value.shape)
        self.dtype = dtype

    def _rounded(self, value: Tensor, error: Tensor) -> Bounded:
        error = error + UNIT[self.dtype] * (value.abs() + error) + TINY[self.dtype]
        return Bounded(value, error, self.dtype)

    def _lift(self, other: Any) -> Bounded:
        if isinstance(other, Bounded):
            return other
        # A hyper-parameter is rounded first. Before, it was computed in float64, as 1 - beta**step:
        # a few roundings of numbers that may be close to 1.
        value = torch.tensor(float(other), dtype=F64)
        return Bounded(value, UNIT[self.dtype] * value.abs() + 4 * UNIT[F64], self.dtype)

    def __add__(self, other: Any) -> Bounded:
        other = self._lift(other)
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Any) -> Bounded:
        other = self._lift(other)
        return self._rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Any) -> Bounded:
        a, b = self, self._lift(other)
        error = a.error * b.value.abs() + a.value.abs() * b.error + a.error * b.error
        return self._rounded(a.value * b.value, error)

    def __truediv__(self, other: Any) -> Bounded:
        a, b = self, self._lift(other)
        value = a.value / b.value
        smallest = (b.value.abs() - b.error).clamp(min=0)
        return self._rounded(value, (a.error + value.abs() * b.error) / smallest)

    def __pow__(self, exponent: int) -> Bounded:
        assert exponent == 2
        return self * self

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.dtype)

    __radd__, __rmul__ = __add__, __mul__

    def _become(self, other: Bounded) -> Bounded:
        self.value, self.error = other.value, other.error
        return self

    def __isub__(self, other: Any) -> Bounded:
        return self._become(self - other)

    def __imul__(self, other: Any) -> Bounded:
        return self._become(self * other)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < self._lift(other).value)

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > self._lift(other).value)

    def sqrt(self) -> Bounded:
        value = self.value.sqrt()
        below = value - (self.value - self.error).clamp(min=0).sqrt()
        above = (self.value + self.error).sqrt() - value
        return self._rounded(value, torch.maximum(below, above))

    def square(self) -> Bounded:
        return self * self

    def sum(self) -> Bounded:  # in float64, whatever the terms are
        error = self.error.sum() + self.value.numel() * UNIT[F64] * self.value.abs().sum()
        return self._rounded(self.value.sum(), error)

    def norm(self) -> Bounded:
        return self.square().sum().sqrt()

    def sign(self) -> Bounded:  # any, where that of the argument is not sure
        unsure = self.value.abs() <= self.error
        return Bounded(self.value.sign(), unsure * (1 + self.value.sign().abs()), self.dtype)

    def clamp(self, min: float) -> Bounded:  # noqa: A002
        return Bounded(self.value.clamp(min=min), self.error, self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Bounded, Bounded], kwargs: Any = None
    ) -> Bounded:
        assert func is torch.maximum
        a, b = args
        error = torch.maximum(a.error, b.error)
        return Bounded(torch.maximum(a.value, b.value), error, a.dtype)


class AsStored(dict):
    """States that go on being used as they were stored, and not as they were computed."""

    def __init__(self, bounded: dict[str, Bounded], after: dict[str, Tensor]) -> None:
        super().__init__(bounded)
        self._after = after

    def __setitem__(self, name: str, computed: Bounded) -> None:
        super().__setitem__(name, Bounded(computed.value, computed.error, computed.dtype))
        computed.value, computed.error = self._after[name].double(), torch.zeros(())


def specified(
    optimizer: FusedOptimizer,
    group: dict[str, Any],
    values: dict[str, Tensor],
    grad: Tensor,
    step: int,
    dtype: torch.dtype,
    after: dict[str, Tensor],
) -> dict[str, Bounded]:
    """Returns what a step computed in `dtype` makes of the parameter and states in `values`.

    `after` are the states that it has stored, from which LAMB goes on.
    """
    is_narrowed = dtype == F32 and grad.dtype == F64
    error = UNIT[F32] * grad.double().abs() if is_narrowed else 0.0

    def run(states: Callable[[dict[str, Bounded]], dict[str, Bounded]]) -> dict[str, Bounded]:
        bounded = {name: Bounded(value.double(), 0.0, dtype) for name, value in values.items()}
        param, kept = bounded.pop("param"), states(bounded)
        rule = getattr(naive, optimizer._rule)
        rule(param, Bounded(grad.double(), error, dtype), kept, step, **group)
        return {**kept, "param": param}

    if optimizer._rule == "lamb":  # its norms are of what was computed, before that was stored
        norms, norm = [], Bounded.norm
        with mock.patch.object(Bounded, "norm", lambda self: norms.append(norm(self)) or norms[-1]):
            run(dict)
        with mock.patch.object(Bounded, "norm", side_effect=norms):
            results = run(lambda bounded: AsStored(bounded, after))
    else:
        results = run(dict)
    # Twice: what is computed once here, such as a quotient, may take two roundings there, as the
    # product with a reciprocal; and for float64 the reference itself has as large an error.
    for each in results.values():
        each.error = 2 * each.error
    return results


def assert_rounded_once(stored: Tensor, expected: Bounded, dtype: torch.dtype, what: str) -> None:
    """Checks that `stored` is a number within the bound, rounded to `dtype`.

    Rounding is monotonic: what lies between two numbers lies between them when all are rounded.
    """
    low = (expected.value - expected.error).to(dtype).double()
    high = (expected.value + expected.error).to(dtype).double()
    stored = stored.detach().double()
    wrong = ~((low <= stored) & (stored <= high))
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0])
        low, stored, high = (each.flatten()[at].item() for each in (low, stored, high))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()}; at {at}: {low} <= {stored} <= {high}"
        )


# --------------------------------------------------------------------------------------- all pairs


def all_pairs(factors: dict[str, Sequence[Any]], allowed: Any) -> Iterator[dict[str, Any]]:
    """Yields choices, greedily few, in which each allowed pair of two factors' values is."""
    names = list(factors)

    def place(item: tuple[str, int]) -> int:
        return names.index(item[0])

    def values(row: dict[str, int]) -> dict[str, Any]:
        return {name: factors[name][at] for name, at in row.items()}

    def pairs(row: dict[str, int]) -> set[Any]:
        return set(itertools.combinations(sorted(row.items(), key=place), 2))

    missing = set()
    for a, b in itertools.combinations(names, 2):
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b]))):
            if allowed(values({a: i, b: j})):
                missing |= pairs({a: i, b: j})
    while missing:
        row = dict(min(missing))
        for name in names:
            if name not in row:
                rows = [{**row, name: at} for at in range(len(factors[name]))]
                rows = [each for each in rows if allowed(values(each))]
                row = max(rows, key=lambda each: len(pairs(each) & missing))
        missing -= pairs(row)
        yield values(row)


# ------------------------------------------------------------------------------- beside torch's own

NAMESAKES = {name: getattr(torch.optim, name) for name in FUSED if hasattr(torch.optim, name)}
SHAPES = [(7,), (5, 6), (), (2, 3, 4), (33,)]


class Twins:
    """The same parameters under a fused optimizer and under torch's, in a plain loop."""

    def __init__(self, name: str, *, dtype: torch.dtype = F64, **options: Any) -> None:
        self.generator = torch.Generator().manual_seed(len(repr((name, options))))
        self.dtype = dtype
        values = [randn(shape, dtype, self.generator) for shape in SHAPES]
        self.params = tuple([parameter(value.clone()) for value in values] for _ in range(2))
        self.ours: torch.optim.Optimizer = FUSED[name](self.params[0], **options)
        self.theirs = NAMESAKES[name](self.params[1], foreach=False, **options)

    def make_grads(self) -> None:
        for ours, theirs in zip(*self.params, strict=True):
            theirs.grad = randn(theirs.shape, self.dtype, self.generator)
            ours.grad = theirs.grad.clone()

    def step(self) -> None:
        self.make_grads()
        self.ours.step()
        self.theirs.step()

    def check(self, states: bool = True) -> None:
        """Compares, to a few roundings in the dtype that both compute in."""
        close = {F64: {"rtol": 1e-11, "atol": 1e-13}, F32: {"rtol": 2e-5, "atol": 1e-6}}[self.dtype]
        for ours, theirs in zip(*self.params, strict=True):
            torch.testing.assert_close(ours, theirs, **close)
            for key, value in self.theirs.state[theirs].items() if states else ():
                kept = self.ours.state[ours][key]
                if isinstance(value, Tensor):
                    torch.testing.assert_close(kept, value, **close)
