"""DDP and FSDP2 under torch.compile train what one process does, uncompiled."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch._inductor.pattern_matcher  # else each rank that compiles imports it, for a second
from _models import assert_same, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    """mlp, in a class that is not torch's: frames of torch.nn are not compiled by themselves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, _, self.second, _, self.last = mlp(seed=seed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs).tanh()).tanh())


class Wide(nn.Module):
    """Two of its layers fill a bucket of 1 MB each, which is the least that a graph is split at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = itertools.pairwise([7, 400, 400, 400, 3])
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train_and_compare(
    me: Rank, compiled: nn.Module, model: nn.Module, counter: CompileCounterWithBackend
) -> int:
    """Returns how many graphs there are."""
    train(compiled, sgd(model), me.rank, steps=4)
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    return counter.frame_count


def ddp_in_parts(me: Rank, backend: str) -> None:
    """The graph is split where the buckets are, so that their reductions overlap its backward."""
    counter = CompileCounterWithBackend(backend)
    model = DDP(Wide(), bucket_cap_mb=1)
    compiled = torch.compile(model, backend=counter)
    train(compiled, sgd(model), me.rank)
    assert_same(model, train_alone(Wide(), me.size))
    assert counter.frame_count == 3


def ddp_in_one(me: Rank, backend: str) -> None:
    torch._dynamo.config.optimize_ddp = False
    counter = CompileCounterWithBackend(backend)
    model = DDP(Net(seed=me.rank), bucket_cap_mb=1e-5, gradient_as_bucket_view=True)
    assert train_and_compare(me, torch.compile(model, backend=counter), model, counter) == 1


def ddp_inside(me: Rank, backend: str) -> None:
    """What is wrapped has been compiled before."""
    counter = CompileCounterWithBackend(backend)
    model = DDP(torch.compile(Net(seed=me.rank), backend=counter), static_graph=True)
    assert train_and_compare(me, model, model, counter) == 1


def ddp_in_python(me: Rank, backend: str) -> None:
    """The backward is compiled too, with the reductions of the gradients in it."""
    torch._dynamo.config.optimize_ddp = "python_reducer"
    torch._dynamo.config.compiled_autograd = True
    counter = CompileCounterWithBackend(backend)
    model = DDP(Net(seed=me.rank))
    optimizer = sgd(model)

    @torch.compile(backend=counter)
    def backward(step: int) -> None:
        loss_of(model, me.rank, step).backward()

    for step in range(4):
        optimizer.zero_grad()
        backward(step)
        optimizer.step()
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    assert counter.frame_count >= 2


def shard(model: nn.Module, layers: list[nn.Module], size: int) -> nn.Module:
    for module in (*layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    return model


def fsdp_by_block(me: Rank, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    model = mlp()
    for i in (0, 2):
        model[i] = torch.compile(model[i], backend=counter, fullgraph=True)
    shard(model, [model[0], model[2]], me.size)
    assert train_and_compare(me, model, model, counter) == 2


def fsdp_whole(me: Rank, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    model = Net()
    shard(model, [model.first, model.second], me.size)
    assert train_and_compare(me, torch.compile(model, backend=counter), model, counter) > 0


FUNCTIONS = [ddp_in_parts, ddp_in_one, ddp_inside, ddp_in_python, fsdp_by_block, fsdp_whole]
SLOW = [ddp_in_python]


@pytest.mark.parametrize("function", [each for each in FUNCTIONS if each not in SLOW])
def test_training(function, tmp_path):
    run(function, 2, tmp_path, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS)
def test_three_ranks(function, tmp_path):
    run(function, 3, tmp_path, "aot_eager")


def with_inductor(me: Rank, function) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(me.folder / f"inductor{me.rank}")
    torch._inductor.config.compile_threads = 1
    function(me, "inductor")


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS)
def test_inductor(function, tmp_path):
    run(with_inductor, 2, tmp_path, function, limit_s=600, timeout_s=300)
