"""Fused optimizers in CUDA graphs and under torch.compile on CUDA: replays step on as eager steps
do, and follow hyper-parameters as they are set."""

from __future__ import annotations

import math

import pytest
import torch
from _optim import F32, F64, FUSED, parameter, randn
from _optim_cuda import make
from torch.nn import Parameter

from torch_gpumode import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", FUSED)
def test_graph(name: str):
    """Replays step on, as eager steps do; both kinds mix."""
    ours, theirs = make(), make()
    optimizers = [FUSED[name](p, lr=0.1) for p in (ours, theirs)]
    generator = torch.Generator().manual_seed(3)

    def new_grads() -> None:
        for a, b in zip(ours, theirs, strict=True):
            b.grad = randn(a.shape, F32, generator).cuda()
            a.grad.copy_(b.grad)

    static = [param.grad for param in ours]
    for _ in range(2):
        new_grads()
        for optimizer in optimizers:
            optimizer.step(max_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step(max_norm=1.0)
    for number in range(6):
        for param, grad in zip(ours, static, strict=True):
            param.grad = grad
        new_grads()
        optimizers[1].step(max_norm=1.0)
        if number in (2, 3):  # eager in between, with gradients elsewhere
            for param in ours:
                param.grad = param.grad.clone()
            optimizers[0].step(max_norm=1.0)
        else:
            graph.replay()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), number
            for key, value in optimizers[1].state[b].items():
                assert torch.equal(optimizers[0].state[a][key], value), key


def test_eager_after_a_graph_that_nobody_replays():
    """What a capture uploads is not there before the graph runs."""
    cuda, cpu = both()
    ours, theirs = (optim.FusedAdamW(params, lr=0.1) for params in (cuda, cpu))
    ours.step()
    theirs.step()
    cuda[1].grad = torch.ones_like(cuda[1]).repeat(2)[::2]  # lies otherwise than before
    cpu[1].grad = cuda[1].grad.cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(2):
        ours.step()
        theirs.step()
        assert same(cuda, cpu)
    graph.replay()
    theirs.step()
    assert same(cuda, cpu)


def both() -> tuple[list[Parameter], list[Parameter]]:
    """Returns parameters on CUDA, and the same on the CPU: a reference that no graph reads."""
    cuda = make()
    cpu = [parameter(p.detach().cpu()) for p in cuda]
    for a, b in zip(cuda, cpu, strict=True):
        b.grad = a.grad.cpu()
    return cuda, cpu


def same(cuda: list[Parameter], cpu: list[Parameter]) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(cuda, cpu, strict=True))


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("change_first", [False, True])
def test_hyper_parameters_move(change_first: bool, is_eager: bool):
    """Numbers that are set between steps or replays, and right before the capture."""
    ours, theirs = both()
    optimizers = [optim.FusedAdamW([{"params": p[:1]}, {"params": p[1:]}]) for p in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    for optimizer in optimizers:
        optimizer.step()
        if change_first:
            optimizer.param_groups[0]["lr"] = 0.3
    graph = torch.cuda.CUDAGraph()
    if not is_eager:
        with torch.cuda.graph(graph):
            optimizers[0].step()
    for number in range(4):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.param_groups[1]["weight_decay"] = 0.1 * number
            optimizer.param_groups[0]["betas"] = (0.5 + 0.1 * number, 0.9)
            scheduler.step()
        if is_eager:
            optimizers[0].step()
        else:
            graph.replay()
        optimizers[1].step()
        assert same(ours, theirs), number
    if is_eager:
        return
    with pytest.raises(ValueError, match="Invalid"):
        optimizers[0].param_groups[0]["lr"] = math.nan
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def test_hyper_parameters_that_are_tensors_move():
    ours, theirs = both()
    lr = torch.tensor(0.1, device="cuda", dtype=F64)
    optimizer, reference = optim.FusedAdamW(ours, lr=lr), optim.FusedAdamW(theirs, lr=0.1)
    for each in (optimizer, reference):
        each.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for value in (0.5, 0.25, 0.125, 2.0):
        lr.fill_(value)
        reference.param_groups[0]["lr"] = value
        if value == 2.0:
            optimizer.step()
        else:
            graph.replay()
        reference.step()
        assert same(ours, theirs)


def test_betas_in_a_list_that_changes():
    ours, theirs = both()
    betas: tuple[list[float], ...] = ([0.9, 0.99], [0.9, 0.99])
    optimizers = [
        optim.FusedAdam(p, lr=0.1, betas=b)  # type: ignore[arg-type]
        for p, b in zip((ours, theirs), betas, strict=True)
    ]
    for beta in (0.9, 0.5, 0.25):
        for optimizer, each in zip(optimizers, betas, strict=True):
            each[0] = beta
            optimizer.step()
        assert same(ours, theirs), beta


def test_graph_and_a_tensor_on_the_cpu():
    optimizer = optim.FusedAdamW(make(), lr=torch.tensor(0.1))
    optimizer.step()

    def record() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()

    with pytest.raises(RuntimeError, match="a tensor on the CPU"):
        record()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", FUSED)
def test_compiled(name: str, mode: str):
    """One graph, which lr and other numbers that move do not change, and the eager steps' bits."""
    torch._dynamo.reset()
    ours, theirs = both()
    optimizers = [FUSED[name](p, lr=0.1, weight_decay=0.1) for p in (ours, theirs)]
    step = torch.compile(lambda: optimizers[0].step(max_norm=1.0), fullgraph=True, mode=mode)
    generator = torch.Generator().manual_seed(5)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for number in range(5):
            for a, b in zip(ours, theirs, strict=True):
                b.grad = randn(a.shape, F32, generator)
                a.grad.copy_(b.grad)
            if number == 3:
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 0.5
            torch.compiler.cudagraph_mark_step_begin()
            step()
            optimizers[1].step(max_norm=1.0)
            for a, b in zip(ours, theirs, strict=True):  # norms are added up in another order
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6, msg=str(number))


def test_graph_errors():
    params = make()
    optimizer = optim.FusedAdamW(params)
    with (
        pytest.raises(RuntimeError, match="no state yet"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
    for param in params:
        param.grad = None
    with (
        pytest.raises(RuntimeError, match="no parameter has a gradient"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    params[0].grad = torch.randn_like(params[0])
    optimizer.step()
