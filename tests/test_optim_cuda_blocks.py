"""States of 8 bits on CUDA: the same bits as on the CPU, which has been compared with the
specification."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from _optim import BF16, F16, F32, FUSED, bits, parameter, randn
from _optim_cases import RULES
from _optim_cuda import SUMS, Pair
from torch.nn import Parameter

from torch_gpumode import optim
from torch_gpumode.optim import FusedMuon, FusedOptimizer, _blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

U8 = torch.uint8
NUM_STEPS = 3


def contiguous(*sizes: int) -> list[Any]:
    return [("contiguous", (size,), "contiguous") for size in sizes]


# What is loaded ahead, and what is not: the gradient lies otherwise, or memory is not aligned.
TENSORS = [
    *contiguous(70_001, 4096, 4095),
    ("contiguous", (211, 103), "transposed"),
    ("contiguous", (9001,), "misaligned"),
    ("misaligned", (9001,), "contiguous"),
    ("contiguous", (64, 300), "expanded"),
]


@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("param", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_every_rule(rule: int, param: torch.dtype, grad: torch.dtype):
    name, options = RULES[rule]
    pair = Pair(name, param, TENSORS, state_dtype=U8, seed=2**63 + 5, **options)
    for number in range(1 if name in SUMS else NUM_STEPS):  # one bit decides how the next round
        pair.make_grads(grad, number)
        pair.step()
    pair.check()


@pytest.mark.parametrize("options", [{}, {"master": "remainder16"}, {"master": "fp32"}], ids=str)
def test_every_tail(options: dict[str, Any]):
    """Tensors that end anywhere in a block, in a vector, and in a tile."""
    sizes = [4096 + 13 * i for i in range(80)] + [8 * 2048 + i for i in (-1, 0, 1, 8, 127, 129)]
    pair = Pair("AdamW", BF16, contiguous(*sizes), state_dtype=U8, **options)
    for number in range(NUM_STEPS):
        pair.make_grads(BF16, number)
        pair.step()
        pair.check()


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_more_tiles_than_blocks(name: str):
    """Beside tensors whose states are float32."""
    sizes = (3_000_001, 5, 500_000, 70_001, 9_000_003, 0, 65_536, 1)
    pair = Pair(name, F32, contiguous(*sizes), state_dtype=U8)
    for number in range(NUM_STEPS):
        pair.make_grads(F32, number)
        pair.step()
    pair.check()


def both(name: str, numel: int, **options: Any) -> tuple[list[Parameter], list[FusedOptimizer]]:
    """Returns one parameter on CUDA and the same on the CPU, and their optimizers."""
    values = randn([numel], F32, torch.Generator().manual_seed(numel))
    params = [parameter(values.cuda()), parameter(values.clone())]
    return params, [FUSED[name]([p], lr=0.1, state_dtype=U8, **options) for p in params]


def step(
    params: list[Parameter], optimizers: list[FusedOptimizer], grad: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Returns the states that it makes, on the CPU."""
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = grad.to(param.device)
        optimizer.step()
    return [
        [value.cpu() for value in optimizer.state[param].values()]
        for param, optimizer in zip(params, optimizers, strict=True)
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25, 1e-30, 1e-42])
def test_what_codes_do_not_reach(bad: float):
    params, optimizers = both("Adam", 10_001)
    generator = torch.Generator().manual_seed(1)
    for where in (300, 10_000, 5000):
        grad = randn([10_001], F32, generator)
        grad[where : where + 130] *= bad
        cuda, cpu = step(params, optimizers, grad)
        assert all(map(torch.equal, cuda, cpu))
    torch.testing.assert_close(params[0].cpu(), params[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_squares", [False, True])
def test_packing(is_squares: bool):
    generator = torch.Generator().manual_seed(2)
    values = randn([2**20 + 777], F32, generator) * torch.exp(9 * randn([1], F32, generator))
    values = values.square() if is_squares else values
    packed = _blocks.pack(values, is_squares)
    on_cuda = _blocks.pack(values.cuda(), is_squares)
    assert torch.equal(on_cuda.cpu(), packed)
    back = _blocks.unpack(on_cuda, values.cuda(), is_squares)
    assert bits(back.cpu()) == bits(_blocks.unpack(packed, values, is_squares))


def test_checkpoints_between_devices():
    """Both go on from the other's with the same bits."""
    params, optimizers = both("AdamW", 20_003)
    generator = torch.Generator().manual_seed(3)
    step(params, optimizers, randn([20_003], F32, generator))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    for optimizer, other in zip(optimizers, saved[::-1], strict=True):
        optimizer.load_state_dict(other)
    cuda, cpu = step(params, optimizers, randn([20_003], F32, generator))
    assert all(map(torch.equal, cuda, cpu))
    assert bits(params[0].cpu()) == bits(params[1])


def test_states_in_other_memory():
    """Replaced by others, in memory that is not aligned, and back."""
    params, optimizers = both("AdamW", 20_003)
    generator = torch.Generator().manual_seed(4)
    step(params, optimizers, randn([20_003], F32, generator))
    for shift in (0, 1, 16, 0):
        state = optimizers[0].state[params[0]]
        for key in ("exp_avg", "exp_avg_sq"):
            old = state[key]
            memory = torch.full((old.numel() + shift,), 77, dtype=U8, device="cuda")
            memory[shift:] = old
            state[key] = memory[shift:]
            old.fill_(99)  # which nobody reads any more
        cuda, cpu = step(params, optimizers, randn([20_003], F32, generator))
        assert all(map(torch.equal, cuda, cpu)), shift
        state["exp_avg"].data = state["exp_avg"].data.clone()
        cuda, cpu = step(params, optimizers, randn([20_003], F32, generator))
        assert all(map(torch.equal, cuda, cpu)), shift


def test_graph():
    params, optimizers = both("AdamW", 20_003)
    generator = torch.Generator().manual_seed(5)
    step(params, optimizers, randn([20_003], F32, generator))
    static = params[0].grad
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(4):
        grad = randn([20_003], F32, generator)
        static.copy_(grad)
        graph.replay()
        step(params[1:], optimizers[1:], grad)
        assert bits(params[0].cpu()) == bits(params[1])
        for ours, theirs in zip(
            *(list(o.state[p].values()) for o, p in zip(optimizers, params, strict=True)),
            strict=True,
        ):
            assert torch.equal(ours.cpu(), theirs)


def test_compiled():
    generator = torch.Generator().manual_seed(6)
    params, optimizers = both("AdamW", 20_003)
    step(params, optimizers, randn([20_003], F32, generator))
    compiled = torch.compile(optimizers[0].step, fullgraph=True)
    for _ in range(3):
        grad = randn([20_003], F32, generator)
        params[0].grad.copy_(grad)
        compiled()
        step(params[1:], optimizers[1:], grad)
        assert bits(params[0].cpu()) == bits(params[1])


def test_muon():
    generator = torch.Generator().manual_seed(7)
    values = randn([64, 100], F32, generator)
    params = [parameter(values.cuda()), parameter(values.clone())]
    optimizers = [FusedMuon([param], state_dtype=U8) for param in params]
    for _ in range(3):
        cuda, cpu = step(params, optimizers, randn([64, 100], F32, generator))
        assert all(map(torch.equal, cuda, cpu))


def test_clipped_and_unchanged():
    params, optimizers = both("AdamW", 20_003)
    generator = torch.Generator().manual_seed(8)
    for _ in range(2):
        grad = randn([20_003], F32, generator)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.to(param.device)
            optimizer.step(max_norm=1.0)
    torch.testing.assert_close(params[0].cpu(), params[1], rtol=1e-3, atol=1e-3)
    kept = optimizers[0].state[params[0]]
    before = [params[0].detach().clone(), *(value.clone() for value in kept.values())]
    optimizers[0].found_inf = torch.ones((), device="cuda")
    optimizers[0].step()
    assert all(map(torch.equal, before, (params[0], *kept.values())))


def test_seeds():
    values = randn([5000], F32, torch.Generator().manual_seed(9)).cuda()
    states = []
    for seed in (1, 1, 2):
        param = parameter(values.clone())
        optimizer = optim.FusedAdamW([param], state_dtype=U8, seed=seed)
        param.grad = values
        optimizer.step()
        states.append(optimizer.state[param]["exp_avg"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
