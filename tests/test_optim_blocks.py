"""States of 8 bits: what a step makes of them, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from _optim import BF16, F32, F64, FUSED, bits, num_threads, parameter, randn
from _optim_cases import RULES
from torch import Tensor, nn

from torch_gpumode.optim import FusedMuon, _blocks

U8 = torch.uint8
BLOCK = 128
SEED = 2**63 + 5
# Whole blocks; a part of one; the least that is packed, and the most that is not.
SIZES = [(40, 128), (5003,), (4096,), (4095,)]


def wild(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of many magnitudes, such that some vanish beside others, and some zeros."""
    spread = torch.exp(3 * torch.randn(shape, generator=generator))
    kept = torch.rand(shape, generator=generator) > 0.05
    return (torch.randn(shape, generator=generator) * spread * kept).to(dtype)


def squares_of(name: str) -> frozenset[str]:
    return frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"}) & {name}


# ---------------------------------------------------------------------- the format, in float64


def codes_and_exponents(values: Tensor, is_squares: bool, random: Tensor) -> tuple[Tensor, Tensor]:
    """Packs finite float32 values, given random numbers of 16 bits: the specification."""
    mantissa, shift = 3, 20
    lowest = -30 if is_squares else -14
    num_blocks = -(-values.numel() // BLOCK)
    padding = num_blocks * BLOCK - values.numel()
    flat = nn.functional.pad(values.flatten(), (0, padding))
    magnitudes = flat.double().abs().view(-1, BLOCK)
    fraction, exponent = torch.frexp(magnitudes.amax(1, keepdim=True))
    most = 2 - 2.0 ** -(3 if is_squares else 2)  # e4m3's last code is NaN
    exponent = torch.where(fraction * 2 > most, exponent + 1, exponent) - 1
    biased = torch.where(fraction == 0, 0, exponent + 127).clamp(min=4 - lowest)
    scaled = magnitudes * torch.exp2(127.0 - biased)
    _, exponent = torch.frexp(scaled)
    exponent = (exponent - 1).clamp(min=lowest)
    # Of the bits that are cut off, what is left counts how likely the upper neighbour is.
    exact = (scaled * torch.exp2(shift + mantissa - exponent.double())).round().long()
    random = nn.functional.pad(random, (0, padding)).view(-1, BLOCK)
    units = (exact + (random << (shift - 16))) >> shift
    is_normal = units >= 1 << mantissa
    codes = torch.where(is_normal, units + ((exponent - lowest) << mantissa), units)
    signs = 128 * flat.view(-1, BLOCK).signbit()
    codes = codes.clamp(min=1) if is_squares else codes + signs
    return codes.flatten()[: values.numel()].to(U8), biased.flatten().to(U8)


def mix(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x


def random_numbers(step: int, tensor: int, state: int, numel: int) -> Tensor:
    key = mix(torch.tensor((SEED & 0xFFFFFFFF) ^ 0x9E3779B9))
    key = mix(key ^ (SEED >> 32))
    for word in (step, tensor, 1 + state, 0):
        key = mix((key + word) & 0xFFFFFFFF)
    elements = torch.arange(numel)
    return (mix(elements // 2 ^ key) >> 16 * (elements % 2)) & 0xFFFF


def parts(packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    start, num_blocks = -(-numel // 16) * 16, -(-numel // BLOCK)
    assert packed.dtype == U8
    assert packed.shape == (start + -(-num_blocks // 16) * 16,)
    return packed[:numel], packed[start : start + num_blocks]


# --------------------------------------------------------------------------------------- steps


def is_packed(param: Tensor, name: str, options: dict[str, Any]) -> bool:
    exact = options.get("centered") and name != "momentum_buffer"
    exact = exact or (options.get("amsgrad") and name != "exp_avg")
    return param.numel() >= 4096 and param.dtype != F64 and not exact


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_every_rule(rule: int, dtype: torch.dtype):
    """From the same states the same step as with float32, and those rounded as specified."""
    name, options = RULES[rule]
    generator = torch.Generator().manual_seed(rule)
    params = [parameter(wild(size, dtype, generator)) for size in SIZES]
    options = {"lr": 0.01, **options}
    ours = FUSED[name](params, **options, state_dtype=U8, seed=SEED)
    for step in range(1, 5):
        twins = [parameter(param.detach().clone()) for param in params]
        exact = FUSED[name](twins, **options)
        exact.load_state_dict(copy.deepcopy(ours.state_dict()))
        for param, twin in zip(params, twins, strict=True):
            twin.grad = wild(param.shape, F32, generator)
            param.grad = twin.grad.clone()
        ours.step()
        exact.step()
        names = ours._state_names(ours.param_groups[0])
        for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
            if name != "LAMB":  # which goes on from what was stored
                assert bits(param) == bits(twin)
            kept = ours.state[param]
            for k, key in enumerate(names):
                if key is None:
                    continue
                if not is_packed(param, key, options):
                    assert bits(kept[key]) == bits(exact.state[twin][key])
                    continue
                random = random_numbers(step, number, k, param.numel())
                right = codes_and_exponents(exact.state[twin][key], bool(squares_of(key)), random)
                for got, expected in zip(parts(kept[key], param.numel()), right, strict=True):
                    assert torch.equal(got, expected), (key, step, number)


def test_the_average_is_right():
    """What is far below the distance between two codes still adds up, in all elements alike."""
    param = parameter(torch.zeros(100_000))
    optimizer = FUSED["AdamW"]([param], betas=(0.9, 0.999), state_dtype=U8)
    param.grad = torch.ones(100_000)
    steps = 3000
    for _ in range(steps):
        optimizer.step()
    kept = optimizer.state_dict()["state"][0]
    right = 1 - 0.999**steps
    assert abs(kept["exp_avg"].double().mean() - 1) < 0.01
    root = kept["exp_avg_sq"].double().sqrt().mean()
    assert abs(root - right**0.5) < 0.02 * right**0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_spoils_its_block(bad: float):
    param = parameter(torch.zeros(5000))
    optimizer = FUSED["Adam"]([param], state_dtype=U8)
    param.grad = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    param.grad[300] = bad
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state_dict()["state"][0][key]
        assert state.isnan().nonzero().flatten().tolist() == list(range(256, 384))


def test_what_is_too_small_or_too_large_for_codes():
    """Exponents end before a float's do: below as zero or the least, above as not finite."""
    for value, is_finite in ((1e-44, True), (1e-30, True), (1.4e38, True), (3e38, False)):
        param = parameter(torch.zeros(4096))
        optimizer = FUSED["SGD"]([param], lr=0.0, momentum=0.5, state_dtype=U8)
        param.grad = torch.full((4096,), value)
        optimizer.step()
        state = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert state.isfinite().all() if is_finite else state.isnan().all()
        if 1e-35 < value < 1e38:
            assert ((state / value - 1).abs() < 2**-3).all()


def test_signed_codes_are_float8():
    packed = torch.arange(256).to(U8).repeat(40)
    exponents = torch.arange(80).to(U8) + 40
    is_nan = packed & 127 == 127
    right = packed.view(torch.float8_e4m3fn).float() * torch.exp2(
        exponents.float() - 127 - 8
    ).repeat_interleave(BLOCK)
    got = _blocks.unpack(torch.cat((packed, exponents)), right, is_squares=False)
    assert bits(got[~is_nan]) == bits(right[~is_nan])


def test_no_square_becomes_zero():
    """A step is divided by its root."""
    param = parameter(torch.zeros(4096))
    optimizer = FUSED["Adam"]([param], state_dtype=U8)
    param.grad = torch.full((4096,), 1e-9)
    param.grad[::BLOCK] = 1e6
    for _ in range(10):
        optimizer.step()
        assert (optimizer.state_dict()["state"][0]["exp_avg_sq"] > 0).all()


@pytest.mark.parametrize("name", FUSED)
def test_threads_and_layout_of_gradients_do_not_matter(name: str):
    results = []
    for threads, is_transposed in ((1, False), (2, True), (3, False)):
        generator = torch.Generator().manual_seed(3)
        params = [parameter(wild((300, 211), F32, generator)) for _ in range(2)]
        optimizer = FUSED[name](params, lr=0.01, state_dtype=U8)
        for _ in range(2):
            for param in params:
                grad = wild((300, 211), F32, generator)
                param.grad = grad.T.contiguous().T if is_transposed else grad
            with num_threads(threads):
                optimizer.step()
        results.append(bits([params, [optimizer.state[param] for param in params]]))
    assert results[0] == results[1] == results[2]


def test_masters():
    for master in ("fp32", "remainder16"):
        generator = torch.Generator().manual_seed(4)
        param = parameter(wild((5000,), BF16, generator))
        optimizer = FUSED["AdamW"]([param], state_dtype=U8, master=master)
        param.grad = wild((5000,), BF16, generator)
        optimizer.step()
        kept = optimizer.state[param]
        assert kept["exp_avg"].dtype == U8
        assert kept["master_param" if master == "fp32" else "remainder"].dtype != U8


def test_muon():
    generator = torch.Generator().manual_seed(5)
    values = randn([64, 100], F32, generator)
    params = [parameter(values.clone()) for _ in range(2)]
    optimizers = [FusedMuon([params[0]], state_dtype=U8), FusedMuon([params[1]])]
    for _ in range(5):
        grad = randn([64, 100], F32, generator)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert optimizers[0].state[params[0]]["momentum_buffer"].dtype == U8
    moved = [param.detach() - values for param in params]
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[1].norm()
    assert not torch.equal(*moved)
