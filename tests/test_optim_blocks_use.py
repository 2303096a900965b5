"""States of 8 bits as users see them: checkpoints, switches, copies, other steps, bad input."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from _compiled import Pair
from _optim import BF16, F16, F32, F64, FUSED, bits, everything, parameter
from test_optim_blocks import BLOCK, SIZES, U8, wild
from torch import Tensor, nn

from torch_gpumode.optim import FusedMuon, FusedOptimizer, _blocks, _fused, attach


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
    assert state["exp_avg"].nbytes == state["exp_avg_sq"].nbytes == 5120 + 48
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
    padding = -values.numel() % BLOCK
    largest = nn.functional.pad(values.abs(), (0, padding)).view(-1, BLOCK).amax(1)
    largest = largest.repeat_interleave(BLOCK)[: values.numel()]
    smallest_normal = 2.0 ** (-30 if is_squares else -14) * largest
    half_a_step = 2.0**-4 * torch.maximum(values.abs(), 1.15 * smallest_normal)
    is_least = is_squares & (back <= 1.15 * 2.0**-3 * smallest_normal)  # it never becomes zero
    assert ((back - values).abs() <= 1.001 * half_a_step)[~is_least].all()
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
    with pytest.raises(RuntimeError, match=r"in blocks of 8 bits.*expected 5168 bytes"):
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


def test_state_dict_is_of_one_moment():
    """What is unpacked is a copy, and so is the step that belongs to it."""
    optimizer, params = trained()
    saved = optimizer.state_dict()
    before = bits(saved["state"][0])
    train(optimizer, params, 3, torch.Generator().manual_seed(1))
    assert bits(saved["state"][0]) == before
