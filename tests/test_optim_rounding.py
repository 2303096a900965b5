"""How results are stored: halves, stochastic rounding, remainders; whatever threads and layout."""

from __future__ import annotations

import math
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
    bits,
    joined,
    laid_out,
    num_threads,
    parameter,
    randn,
)
from torch import Tensor

ELEMENTWISE = sorted(FUSED.keys() - {"LAMB", "NovoGrad"})


def stored(values: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """Returns how a parameter that becomes exactly these values is stored, and its state."""
    param = parameter(torch.zeros(values.shape).copysign(values).to(dtype))
    optimizer = FUSED["SGD"]([param], lr=1.0, **options)
    param.grad = -values
    optimizer.step()
    return param.detach(), optimizer.state[param]


def assert_same(result: Tensor, expected: Tensor) -> None:
    """Compares bits; NaN with any NaN."""
    assert result.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    zero = torch.zeros((), dtype=result.dtype)
    assert bits(torch.where(nan, zero, result)) == bits(torch.where(nan, zero, expected))


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)


def hard_floats(dtype: torch.dtype) -> Tensor:
    """All numbers of a half format, what lies around them and between, and any other floats."""
    generator = torch.Generator().manual_seed(0)
    numbers = all_patterns(dtype).float().view(torch.int32)
    cut = 2 ** (16 if dtype == BF16 else 13)  # of a float's bits, what a half lacks
    offsets = torch.tensor([0, 1, cut // 2 - 1, cut // 2, cut // 2 + 1, cut - 1])
    near = (numbers[:, None].to(torch.int64) + offsets).flatten()
    anything = torch.randint(-(2**31), 2**31, [300_001], generator=generator)
    every = torch.cat([near, anything]).clamp(-(2**31), 2**31 - 1)
    subnormal = torch.rand(50_000, generator=generator) * 2.0**-13  # of float16
    return torch.cat([every.to(torch.int32).view(F32), subnormal])


# ------------------------------------------------------------------------------------- to nearest


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_halves_are_narrowed_as_torch_does(dtype: torch.dtype):
    values = hard_floats(dtype)
    assert_same(stored(values, dtype)[0], values.to(dtype))


@pytest.mark.parametrize("to", [F32, F64], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_halves_are_widened_as_torch_does(dtype: torch.dtype, to: torch.dtype):
    values = all_patterns(dtype)
    assert_same(stored(values, to)[0], values.to(to))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_update_is_exact(dtype: torch.dtype):
    """A gradient of 0 leaves every number as it is."""
    values = all_patterns(dtype) if dtype.itemsize == 2 else all_patterns(F16).to(dtype)
    param = parameter(values.clone())
    param.grad = torch.zeros(values.shape)
    FUSED["SGD"]([param]).step()
    assert_same(param.detach(), values)


def test_float64_gradients_of_float32():
    values = torch.randn(50_000, dtype=F64, generator=torch.Generator().manual_seed(1))
    values *= 10.0 ** torch.randint(-44, 38, values.shape, generator=torch.Generator())
    assert_same(stored(values, F32)[0], values.to(F32))


# ---------------------------------------------------------------------------- stochastic rounding

ULP = 2.0**-7  # of a bfloat16 in [1, 2)
STOCHASTIC = {"stochastic_rounding": True}


def rounded_up(count: int, fraction: float, **options: Any) -> Tensor:
    """Returns which of many equal values between two neighbours became the upper one."""
    result, _ = stored(torch.full((count,), 1 + fraction * ULP), BF16, **STOCHASTIC, **options)
    result = result.double()
    assert ((result == 1) | (result == 1 + ULP)).all()
    return result > 1


@pytest.mark.parametrize("fraction", [2.0**-16, 0.01, 0.25, 0.5, 0.9, 1 - 2.0**-16])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_average_is_right(fraction: float, seed: int):
    """The number that is rounded up has a binomial distribution: within five deviations of it."""
    count = 500_000
    deviation = math.sqrt(count * fraction * (1 - fraction))
    number = int(rounded_up(count, fraction, seed=seed).sum())
    assert abs(number - count * fraction) <= 5 * deviation + 1


def test_the_average_of_any_values_is_right():
    """Each is rounded to a neighbour, away from or towards zero, with no bias on either side."""
    values = torch.randn(400_000, generator=torch.Generator().manual_seed(2))
    result, _ = stored(values, BF16, **STOCHASTIC)
    below = (values.view(torch.int32) & -(2**16)).view(F32).double()  # towards zero
    ulp = (values.view(torch.int32) | 0xFFFF).view(F32).double() - below
    error = (result.double() - values.double()) / ulp.abs()
    assert (error.abs() < 1.001).all()
    for side in (error, error[values > 0], error[values < 0]):
        assert abs(side.mean()) <= 5 * 0.5 / math.sqrt(side.numel())
    assert not torch.equal(result, values.to(BF16))


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    """Of independent bits, the products' average is within five deviations of the product."""
    a, b = a.double() - 0.5, b.double() - 0.5
    assert abs((a * b).mean()) <= 5 * 0.25 / math.sqrt(a.numel())


def test_elements_are_uncorrelated():
    up = rounded_up(400_000, 0.5, seed=3)
    for lag in [*range(1, 70), 255, 256, 257, 1024, 2**14, 2**16, 2**17]:
        assert_uncorrelated(up[:-lag], up[lag:])


def test_seeds_steps_tensors_and_states_are_uncorrelated():
    count = 100_000
    value = 1 + 0.5 * ULP
    ups = [rounded_up(count, 0.5, seed=seed) for seed in (0, 1, 2, 2**32, 2**63)]
    params = [parameter(torch.ones(count, dtype=BF16)) for _ in range(3)]
    options = {"state_dtype": BF16, "momentum": 0.5, "seed": 9, **STOCHASTIC}
    optimizer = FUSED["SGD"](params, lr=1.0, **options)
    for step in range(3):
        for param in params:
            # The first buffer is the gradient; later ones are made so that they become it again.
            last = optimizer.state[param]["momentum_buffer"].float() if step else torch.zeros(count)
            param.grad = value - 0.5 * last
            param.data.fill_(3)  # becomes 2 - ULP / 2
        optimizer.step()
        ups += [optimizer.state[param]["momentum_buffer"] > 1 for param in params]
        ups += [param == 2 for param in params]
    for i, up in enumerate(ups):
        assert 0.4 < up.double().mean() < 0.6, i
        for other in ups[:i]:
            assert_uncorrelated(up, other)


@pytest.mark.parametrize("name", FUSED)
def test_seeded(name: str):
    """The same seed gives the same bits. Another one, or the next step, gives others."""

    def run(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(4)
        values = [randn([1000], BF16, generator) for _ in range(2)]
        grads = [randn([1000], F32, generator) for _ in range(2)]
        params = [parameter(value.clone()) for value in values]
        options = {"momentum": 0.9} if name == "SGD" else {}
        options |= {"seed": seed, "state_dtype": BF16, **STOCHASTIC}
        optimizer = FUSED[name](params, lr=0.01, **options)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        seen = []
        for _ in range(3):
            optimizer.step()
            seen.append(bits([params, [optimizer.state[param] for param in params]]))
        return seen

    first = run(7)
    assert run(7) == first
    other = run(8)
    assert [a[0] == b[0] for a, b in zip(first, other, strict=True)] == [False] * 3
    assert [a[1] == b[1] for a, b in zip(first, other, strict=True)] == [False] * 3


@pytest.mark.parametrize("name", FUSED)
def test_what_is_not_bfloat16_is_not_rounded_so(name: str):
    """Neither parameters and states of other dtypes, nor a parameter that has a master."""
    for dtype, more in ((F32, {}), (F64, {}), (BF16, {"master": "fp32"})):
        results = []
        for chance in (False, True):
            generator = torch.Generator().manual_seed(5)
            param = parameter(randn([500], dtype, generator))
            optimizer = FUSED[name]([param], lr=0.01, stochastic_rounding=chance, **more)
            for _ in range(3):
                param.grad = randn([500], F32, generator)
                optimizer.step()
            state = {k: v for k, v in optimizer.state[param].items() if k != "step"}
            results.append(bits([param, state]))
        assert results[0] == results[1]


def test_numbers_infinities_and_nan_stay():
    values = all_patterns(BF16).float()
    for seed in range(3):
        assert_same(stored(values, BF16, seed=seed, **STOCHASTIC)[0], values.to(BF16))
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int64).to(torch.int32)
    nans = torch.cat([nans, nans | -(2**31)]).view(F32).repeat(1000)
    assert stored(nans, BF16, **STOCHASTIC)[0].isnan().all()


# ----------------------------------------------------------------------------------- remainder16


def test_split_is_exact():
    """A parameter and its remainder are the float32; the parameter is one of the nearest."""
    values = hard_floats(BF16)
    result, state = stored(values, BF16, master="remainder16")
    assert_same(joined(result, state["remainder"]), values)
    nearest = values.to(BF16)
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    is_same = (result == nearest) | (result.isnan() & nearest.isnan())
    assert (is_same | is_tie).all()
    gap = (result.double() - values.double()).abs()
    finite = result.isfinite() & nearest.isfinite()
    assert (gap[finite] == (nearest.double() - values.double()).abs()[finite]).all()


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_remainder16_equals_a_master(name: str, state_dtype: torch.dtype):
    """Bit for bit, over many steps."""
    runs = {}
    for master in ("fp32", "remainder16"):
        generator = torch.Generator().manual_seed(6)
        shapes = [("contiguous", (300,)), ("slice", (9, 20)), ("transposed", (30, 7))]
        params = [parameter(laid_out(kind, size, BF16, generator)[0]) for kind, size in shapes]
        optimizer = FUSED[name](
            params, lr=0.003, weight_decay=0.1, master=master, state_dtype=state_dtype
        )
        for _ in range(60):
            for param in params:
                param.grad = randn(param.shape, BF16, generator)
            optimizer.step()
        runs[master] = [(param.detach(), optimizer.state[param]) for param in params]
    for (high, state), (param, other) in zip(runs["remainder16"], runs["fp32"], strict=True):
        whole = other.pop("master_param")
        assert_same(joined(high, state.pop("remainder")), whole.contiguous())
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert torch.equal(value, other[key])
        is_tie = (whole.view(torch.int32) & 0xFFFF) == 0x8000
        assert ((high == param) | is_tie).all()
        assert (whole != param.float()).double().mean() > 0.9  # else there was nothing to keep


# ----------------------------------------------------------------------------- threads and layout

KINDS = [
    (F32, {}),
    (F64, {}),
    (BF16, {"state_dtype": BF16, **STOCHASTIC}),
    (BF16, {"master": "remainder16"}),
    (F16, {"master": "fp32"}),
]


@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_threads_do_not_matter(name: str, dtype: torch.dtype, options: dict[str, Any]):
    """The sums over a tensor, of LAMB and NovoGrad, included."""
    results = []
    for threads in (1, 2, 3):
        generator = torch.Generator().manual_seed(7)
        sizes = (3, 100_003, 17_000, 0, 50_001)
        params = [parameter(randn([size], dtype, generator)) for size in sizes]
        optimizer = FUSED[name](params, lr=0.01, weight_decay=0.1, **options)
        for _ in range(2):
            for param in params:
                param.grad = randn(param.shape, dtype, generator)
            with num_threads(threads):
                optimizer.step()
        results.append(bits([params, [optimizer.state[param] for param in params]]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_layout_does_not_matter(name: str, dtype: torch.dtype, options: dict[str, Any]):
    """Every element is computed alike, be it in a vector, the rest of one, or alone."""
    generator = torch.Generator().manual_seed(8)
    shape = (5, 6, 7, 11)
    values = randn(shape, dtype, generator)
    grads = [randn(shape, dtype, generator) for _ in range(3)]
    layouts = ["contiguous", "misaligned", "slice"]
    if "stochastic_rounding" not in options:  # whose bits are those of the n-th element in memory
        layouts += ["transposed", "channels_last"]
    results = []
    for i, layout in enumerate(layouts):
        param = parameter(laid_out(layout, shape, dtype, generator)[0])
        param.data.copy_(values)
        optimizer = FUSED[name]([param], lr=0.01, weight_decay=0.1, **options)
        for j, grad in enumerate(grads):
            param.grad = laid_out(layouts[(i + j) % len(layouts)], shape, dtype, generator)[0]
            param.grad.copy_(grad)
            optimizer.step()
        state = {key: value.contiguous() for key, value in optimizer.state[param].items()}
        results.append(bits([param.detach().contiguous(), state]))
    assert all(result == results[0] for result in results)
