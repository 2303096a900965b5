"""States of 8 bits: what a step makes of them, bit for bit, and what users see of them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from _compiled import Pair
from _optim import BF16, F16, F32, F64, FUSED, bits, everything, num_threads, parameter, randn
from _optim_cases import RULES
from torch import Tensor, nn

from torch_gpumode.optim import FusedMuon, FusedOptimizer, _blocks, _fused, attach

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
    """Packs finite float32 values, given random numbers of 32 bits: the specification."""
    mantissa = 4 if is_squares else 3
    shift = 23 - mantissa
    num_blocks = -(-values.numel() // BLOCK)
    padding = num_blocks * BLOCK - values.numel()
    flat = nn.functional.pad(values.flatten(), (0, padding))
    magnitudes = (flat.double().sqrt().float() if is_squares else flat.abs()).double()
    magnitudes = magnitudes.view(-1, BLOCK)
    fraction, exponent = torch.frexp(magnitudes.amax(1, keepdim=True))
    exponent = torch.where(fraction * 2 > 2 - 2.0**-mantissa, exponent + 1, exponent) - 1
    biased = torch.where(fraction == 0, 0, exponent + 127).clamp(min=32)
    scaled = magnitudes * torch.exp2(127.0 - biased)
    _, exponent = torch.frexp(scaled)
    exponent = (exponent - 1).clamp(min=-14)
    # Of the bits that are cut off, what is left counts how likely the upper neighbour is.
    exact = (scaled * torch.exp2(shift + mantissa - exponent.double())).round().long()
    random = nn.functional.pad(random, (0, padding)).view(-1, BLOCK)
    units = (exact + (random & ((1 << shift) - 1))) >> shift
    is_normal = units >= 1 << mantissa
    codes = torch.where(is_normal, units + ((exponent + 14) << mantissa), units)
    if is_squares:
        codes = torch.where(magnitudes > 0, codes.clamp(min=1), codes)
    else:
        codes = codes + 128 * flat.view(-1, BLOCK).signbit()
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
    return mix(torch.arange(numel) ^ key)


def parts(packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    start = -(-numel // 16) * 16
    assert packed.dtype == U8
    assert packed.shape == (start + -(-numel // BLOCK),)
    return packed[:numel], packed[start:]


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
    for value, is_finite in ((1e-44, True), (1e-30, True), (1.5e38, True), (3e38, False)):
        param = parameter(torch.zeros(4096))
        optimizer = FUSED["SGD"]([param], lr=0.0, momentum=0.5, state_dtype=U8)
        param.grad = torch.full((4096,), value)
        optimizer.step()
        state = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert state.isfinite().all() if is_finite else state.isnan().all()
        if 1e-35 < value < 1e38:
            assert ((state / value - 1).abs() < 2**-3).all()


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


# -------------------------------------------------------------------------------- what users see


def trained(name: str = "AdamW", **options: Any) -> tuple[FusedOptimizer, list[Tensor]]:
    generator = torch.Generator().manual_seed(6)
    params = [parameter(wild(size, F32, generator)) for size in SIZES]
    optimizer = FUSED[name](params, state_dtype=U8, **options)
    train(optimizer, params, 3, generator)
    return optimizer, params


def train(
    optimizer: FusedOptimizer, params: list[Tensor], steps: int, generator: torch.Generator
) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = wild(param.shape, F32, generator)
        optimizer.step()


def test_memory():
    optimizer, params = trained()
    state = optimizer.state[params[0]]
    assert state["exp_avg"].nbytes == state["exp_avg_sq"].nbytes == 5120 + 40
    assert optimizer.state[params[3]]["exp_avg"].nbytes == 4 * 4095


@pytest.mark.parametrize("name", FUSED)
def test_checkpoints_hold_float32_and_bring_every_bit_back(name: str):
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer, params = trained(name, **options)
    before = everything(optimizer)
    saved = optimizer.state_dict()
    names = [key for key in optimizer._state_names(optimizer.param_groups[0]) if key]
    for number, param in enumerate(params):
        for key in names:
            assert saved["state"][number][key].dtype == F32
            assert saved["state"][number][key].shape == param.shape
    assert everything(optimizer) == before
    stream = io.BytesIO()
    torch.save(saved, stream)
    stream.seek(0)
    copies = [parameter(param.detach().clone()) for param in params]
    again = FUSED[name](copies, state_dtype=U8, **options)
    again.load_state_dict(torch.load(stream))
    for each, tensors in ((optimizer, params), (again, copies)):
        train(each, tensors, 3, torch.Generator().manual_seed(7))
    assert bits(copies) == bits(params)
    assert bits(again.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    assert again.state[copies[0]][names[0]].dtype == U8


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "SGD"])
def test_checkpoints_of_torch_both_ways(name: str):
    options = {"lr": 0.01, "momentum": 0.9} if name == "SGD" else {}
    optimizer, params = trained(name, **options)
    copies = [parameter(param.detach().clone()) for param in params]
    theirs = getattr(torch.optim, name)(copies, **options)
    theirs.load_state_dict(optimizer.state_dict())
    for param in copies:
        param.grad = torch.ones_like(param)
    theirs.step()
    optimizer.load_state_dict(theirs.state_dict())
    assert bits(optimizer.state_dict()["state"][1]) == bits(theirs.state_dict()["state"][1])
    train(optimizer, params, 1, torch.Generator().manual_seed(8))
    key = next(key for key in optimizer._state_names(optimizer.param_groups[0]) if key)
    for param in params:
        assert (optimizer.state[param][key].dtype == U8) == (param.numel() >= 4096)


@pytest.mark.parametrize("is_squares", [False, True])
def test_values_are_packed_to_the_nearest(is_squares: bool):
    values = wild((2**20 + 5003,), F32, torch.Generator().manual_seed(9))  # more than a slice
    values = values.square() if is_squares else values
    packed = _blocks.pack(values, is_squares)
    back = _blocks.unpack(packed, values, is_squares)
    assert bits(_blocks.unpack(_blocks.pack(back, is_squares), values, is_squares)) == bits(back)
    roots, of_back = (values.sqrt(), back.sqrt()) if is_squares else (values, back)
    padding = -values.numel() % BLOCK
    largest = nn.functional.pad(roots.abs(), (0, padding)).view(-1, BLOCK).amax(1)
    largest = largest.repeat_interleave(BLOCK)[: values.numel()]
    mantissa = 4 if is_squares else 3
    half_a_step = 2.0 ** -(mantissa + 1) * torch.maximum(roots.abs(), 1.1 * 2.0**-14 * largest)
    is_least = is_squares & (of_back <= 2.0**-17 * largest)  # it never becomes zero
    assert ((of_back - roots).abs() <= 1.001 * half_a_step)[~is_least].all()
    assert ((back == 0) == (values == 0)).all() or not is_squares


SWITCHES = [("Adam", "amsgrad", True), ("SGD", "momentum", 0.9), ("RMSprop", "centered", True)]


@pytest.mark.parametrize("saved_when", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "key", "on"), SWITCHES, ids=[name for name, _, _ in SWITCHES])
def test_checkpoints_between_switches(name: str, key: str, on: Any, saved_when: int):
    """Also of states that are not in use, or have only just become exact or packed."""
    results = []
    for is_saved in (False, True):
        generator = torch.Generator().manual_seed(10)
        params = [parameter(wild((5003,), F32, generator))]
        optimizer = FUSED[name](params, lr=0.01, state_dtype=U8)
        off = optimizer.param_groups[0][key]
        for number, value in enumerate((on, off, on, off)):
            optimizer.param_groups[0][key] = value
            train(optimizer, params, 2, generator)
            if is_saved and number == saved_when:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = FUSED[name](params, lr=0.01, state_dtype=U8)
                optimizer.load_state_dict(saved)
        results.append(bits([params, optimizer.state_dict()["state"]]))
    assert results[0] == results[1]


def test_without_8_bits_again():
    """A checkpoint of 8-bit states is one of float32 to an optimizer that has those."""
    optimizer, params = trained()
    copies = [parameter(param.detach().clone()) for param in params]
    again = FUSED["AdamW"](copies)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[copies[0]]["exp_avg"].dtype == F32


def test_what_users_keep_in_the_state():
    optimizer, params = trained()
    mine = torch.arange(5048, dtype=U8)
    optimizer.state[params[1]]["mine"] = mine
    assert torch.equal(optimizer.state_dict()["state"][1]["mine"], mine)


def test_all_states_are_known():
    on = {"amsgrad": True, "momentum": 0.9, "centered": True}
    for kind in (*FUSED.values(), FusedMuon):
        optimizer = kind([parameter(torch.zeros(2, 2))], lr=0.1)
        group = optimizer.param_groups[0]
        names = optimizer._state_names({**group, **{key: on[key] for key in on if key in group}})
        assert set(names) - {None} <= _fused._STATES
        assert optimizer._squares <= set(names)


def test_copies():
    optimizer, _ = trained()
    for make in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        other = make(optimizer)
        assert other.precision == optimizer.precision
        assert bits(other.state_dict()) == bits(optimizer.state_dict())
        copied = other.param_groups[0]["params"]
        assert other.state[copied[0]]["exp_avg"].dtype == U8


def test_what_stays_float32():
    strided = parameter(torch.randn(100, 100).T)
    double = parameter(torch.randn(5000, dtype=F64))
    half = parameter(torch.randn(5000).to(F16))
    optimizer = FUSED["Adam"]([strided, double, half], state_dtype=U8)
    for param in (strided, double, half):
        param.grad = torch.randn(param.shape)
    optimizer.step()
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in (strided, double, half)]
    assert dtypes == [F32, F64, U8]


def test_centered_later():
    """Its variance is a difference of two states, which are exact from then on."""
    optimizer, params = trained("RMSprop")
    assert optimizer.state[params[0]]["square_avg"].dtype == U8
    before = optimizer.state_dict()["state"][0]["square_avg"]
    optimizer.param_groups[0]["centered"] = True
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    after = optimizer.state[params[0]]["square_avg"]
    assert after.dtype == F32
    torch.testing.assert_close(after, 0.99 * before)


@pytest.mark.parametrize("how", ["attached", "compiled"])
def test_centered_for_others(how: str):
    """Steps inside backward, or compiled ones, replace a state: eager ones must hear of it."""
    results = []
    for dtype in (U8, F32):
        torch._dynamo.reset()
        model = nn.Linear(64, 80, bias=False)
        nn.init.ones_(model.weight)
        optimizer = FUSED["RMSprop"](model.parameters(), lr=0.0, state_dtype=dtype)
        group, param = optimizer.param_groups[0], model.weight

        def step(optimizer: FusedOptimizer = optimizer, param: Tensor = param) -> None:
            param.grad = torch.ones_like(param)
            optimizer.step()

        step()
        group["centered"] = True
        if how == "compiled":
            param.grad = torch.ones_like(param)
            torch.compile(optimizer.step, backend="eager")()
        else:
            with attach(optimizer, model):
                model(torch.ones(1, 64)).sum().backward()
        group["centered"] = False
        step()
        results.append(optimizer.state_dict()["state"][0]["square_avg"].mean())
    torch.testing.assert_close(results[0], results[1], rtol=0.05, atol=0)


def test_under_another_default_device():
    optimizer, params = trained()
    with torch.device("meta"):
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
    train(optimizer, params, 1, torch.Generator().manual_seed(11))
    assert saved["state"][0]["exp_avg"].device.type == "cpu"


def test_compiled():
    pair = Pair("AdamW", (BF16, F32), state_dtype=U8, weight_decay=0.3)
    for _ in range(3):
        pair.step()
    large = pair.params[1][-1]
    assert pair.compiled.state[large]["exp_avg"].dtype == U8
    assert pair.num_graphs == 1


def test_attached():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 70)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [FUSED["AdamW"](model.parameters(), state_dtype=U8) for model in models]
    x = torch.randn(4, 70)
    with attach(optimizers[0], models[0]):
        models[0](x).square().sum().backward()
    models[1](x).square().sum().backward()
    optimizers[1].step()
    assert bits(list(models[0].parameters())) == bits(list(models[1].parameters()))
    assert bits(optimizers[0].state_dict()) == bits(optimizers[1].state_dict())


# --------------------------------------------------------------------------------------- bad input


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match=r"state_dtype: .*on the CPU.* one is on meta"):
        FUSED["Adam"]([nn.Parameter(torch.empty(5000, device="meta"))], state_dtype=U8)


@pytest.mark.parametrize("how", ["bytes", "layout", "shape"])
def test_states_that_do_not_fit(how: str):
    optimizer, params = trained()
    state = optimizer.state[params[0]]
    if how == "bytes":
        state["exp_avg"] = state["exp_avg"][:-1].clone()
    elif how == "shape":
        state["exp_avg"] = state["exp_avg"].view(2, -1)
    else:
        params[0].data = params[0].data.T.contiguous().T
    params[0].grad = torch.randn(params[0].shape)
    before = bits([params, [dict(optimizer.state[param]) for param in params]])
    with pytest.raises(RuntimeError, match=r"in blocks of 8 bits.*expected 5160 bytes"):
        optimizer.step()
    assert bits([params, [dict(optimizer.state[param]) for param in params]]) == before


def test_another_shape():
    """Of as many elements, and with states of as many bytes."""
    for change in (lambda data: data.view(128, 40), lambda data: torch.zeros(40, 127)):
        optimizer, params = trained()
        params[0].data = change(params[0].data)
        params[0].grad = torch.randn(params[0].shape)
        before = bits([params, [dict(optimizer.state[param]) for param in params]])
        with pytest.raises(RuntimeError, match=r"the state of a parameter of shape"):
            optimizer.step()
        assert bits([params, [dict(optimizer.state[param]) for param in params]]) == before
    with pytest.raises(RuntimeError, match=r"exp_avg of a parameter of shape \(40, 127\)"):
        optimizer.state_dict()
