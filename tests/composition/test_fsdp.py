"""FSDP2 on CPU trains what one process does: in every dtype, shape and setting that it reduces by.

It averages gradients, which is AVG, or PREMUL_SUM where the factor is not the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _models import assert_same, batch, loss_of, mlp, sgd, train, train_alone, whole
from _ranks import Rank, run
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint


def line(me: Rank) -> DeviceMesh:
    return init_device_mesh("cpu", (me.size,))


def shard(model: nn.Sequential, mesh: DeviceMesh, **settings: object) -> nn.Sequential:
    """The first layer, the second, and the rest: three all-gathers in a forward."""
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def dtypes(me: Rank, reduce_dtype: torch.dtype, factor: float | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce_dtype)
    model = shard(mlp(dtype=torch.float32), line(me), mp_policy=policy)
    reference = mlp()
    if factor is not None:
        for part in parts(model):
            part.set_gradient_divide_factor(factor)
    loss_of(model, me.rank).backward()
    for rank in range(me.size):
        loss_of(reference, rank).backward()
    tolerance = 1e-5 if reduce_dtype in (torch.float32, torch.float64) else 2e-2
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        expected = theirs.grad / (factor or me.size)
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(whole(ours.grad).double(), expected, rtol=0, atol=atol)


def with_and_without_a_factor(me: Rank, reduce_dtype: torch.dtype) -> None:
    dtypes(me, reduce_dtype, factor=None)
    dtypes(me, reduce_dtype, factor=5.0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "reduce_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_dtypes(reduce_dtype, size, tmp_path):
    run(with_and_without_a_factor, size, tmp_path, reduce_dtype)


def mixed(me: Rank, reduce_dtype: torch.dtype, tolerance: float) -> None:
    """The forward and backward are in bfloat16, the parameters and what is reduced are not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = shard(mlp(dtype=torch.float32), line(me), mp_policy=policy)
    loss_of(model, me.rank).backward()
    references = [mlp(dtype=torch.float32).bfloat16() for _ in range(me.size)]
    for rank, reference in enumerate(references):
        inputs, targets = batch(rank, dtype=torch.float32)
        (reference(inputs.bfloat16()).float() - targets).square().mean().backward()
    for ours, *theirs in zip(
        model.parameters(), *(each.parameters() for each in references), strict=True
    ):
        expected = torch.stack([each.grad.double() for each in theirs]).mean(0)
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(whole(ours.grad).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("reduce_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_mixed(reduce_dtype, tolerance, size, tmp_path):
    run(mixed, size, tmp_path, reduce_dtype, tolerance)


def as_is(model: nn.Sequential) -> None:
    pass


def prefetch(model: nn.Sequential) -> None:
    first, second = model[0], model[2]
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def for_all(setting: str, *values: object) -> Callable[[nn.Sequential], None]:
    def configure(model: nn.Sequential) -> None:
        for part in parts(model):
            getattr(part, setting)(*values)

    return configure


SETTINGS = {
    "plain": ({}, as_is),
    "kept after forward": ({"reshard_after_forward": False}, as_is),
    "resharded at the root": ({}, for_all("set_reshard_after_forward", True)),
    "prefetch": ({}, prefetch),
    "sums only": ({}, for_all("set_force_sum_reduction_for_comms", True)),
}
# FSDP2 divides and sums float64, and averages float32.
BY_SUM_AND_AVERAGE = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def with_settings(me: Rank, settings: dict, configure: Callable[[nn.Sequential], None]) -> None:
    for dtype, tolerance in BY_SUM_AND_AVERAGE:
        model = shard(mlp(dtype=dtype), line(me), **settings)
        configure(model)
        train(model, sgd(model), me.rank, steps=4)
        assert_same(model, train_alone(mlp(), me.size, steps=4), tolerance)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, size, tmp_path):
    run(with_settings, size, tmp_path, *SETTINGS[name])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("set_separate_reduce_scatter_group", True), ("set_reduce_scatter_max_input_buffers", 2)],
)
def test_new_settings(setting, value, tmp_path):
    if not hasattr(FSDPModule, setting):
        pytest.skip("newer than this torch")
    run(with_settings, 3, tmp_path, {}, for_all(setting, value))


def unshard_early(me: Rank) -> None:
    """All-gathers that are started together, waited for or not, and some taken back."""
    model = shard(mlp(), line(me))
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        handles = [part.unshard(async_op=True) for part in parts(model)]
        if step == 1:
            handles[1].wait()
        if step == 2:
            for handle, part in zip(handles, parts(model), strict=True):
                handle.wait()
                part.reshard()
        loss_of(model, me.rank, step).backward()
        optimizer.step()
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    model.unshard()
    reference = train_alone(mlp(), me.size, steps=4)
    torch.testing.assert_close(model[4].weight, reference[4].weight, rtol=0, atol=1e-12)


def accumulate(me: Rank) -> None:
    """Steps of three batches, of which the last one's backward reduces."""
    model, reference = shard(mlp(), line(me)), mlp()
    ours, theirs = sgd(model), sgd(reference)
    for step in range(3):
        ours.zero_grad(), theirs.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_is_last_backward(part == 2)
            model.set_reshard_after_backward(part == 2)
            loss_of(model, me.rank, 3 * step + part).backward()
            for rank in range(me.size):
                (loss_of(reference, rank, 3 * step + part) / me.size).backward()
        ours.step(), theirs.step()
    assert_same(model, reference)


def clip(me: Rank) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        model, reference = shard(mlp(), line(me)), mlp()
        loss_of(model, me.rank).backward()
        for rank in range(me.size):
            (loss_of(reference, rank) / me.size).backward()
        kwargs = {"max_norm": 0.1, "norm_type": norm_type}
        ours = nn.utils.clip_grad_norm_(model.parameters(), **kwargs)
        theirs = nn.utils.clip_grad_norm_(reference.parameters(), **kwargs)
        assert theirs > 0.1
        torch.testing.assert_close(whole(ours), theirs)
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), expected.grad)


def ignore(me: Rank) -> None:
    """The last layer is each rank's own: not sharded, and its gradient not reduced."""
    net, reference, alone = mlp(), mlp(), mlp()
    shard(net, line(me), ignored_params={*net[4].parameters()})
    assert type(net[4].weight) is nn.Parameter
    loss_of(net, me.rank).backward()
    loss_of(alone, me.rank).backward()
    for rank in range(me.size):
        (loss_of(reference, rank) / me.size).backward()
    torch.testing.assert_close(net[4].weight.grad, alone[4].weight.grad)
    torch.testing.assert_close(whole(net[0].weight.grad), reference[0].weight.grad)


def freeze(me: Rank) -> None:
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each[2].requires_grad_(False)
    shard(model, line(me))
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(reference, me.size))
    assert model[2].weight.grad is None


class Tied(nn.Module):
    """One weight is used twice, one layer under checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(), nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.other = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.last.load_state_dict({"weight": mlp(seed=1)[0].weight[:3, :3].detach()})
        self.other.weight = self.last.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.net[:2], inputs, use_reentrant=False)
        return self.other(self.last(self.net[2:](hidden)).tanh())


def tie(me: Rank) -> None:
    model, reference = Tied(), Tied()
    for module in (model.net[0], model):
        fully_shard(module, mesh=line(me))
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(reference, me.size))


def replicated(me: Rank) -> None:
    """FSDP2's reductions, with nothing sharded."""
    model = mlp()
    for module in (model[0], model[2], model):
        replicate(module, mesh=line(me))
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "function", [unshard_early, accumulate, clip, ignore, freeze, tie, replicated]
)
def test_steps(function, size, tmp_path):
    run(function, size, tmp_path)


def one_rank(me: Rank) -> None:
    model = shard(mlp(), line(me))
    train(model, sgd(model), 0)
    assert_same(model, train_alone(mlp(), 1))


def test_one_rank(tmp_path):
    run(one_rank, 1, tmp_path)


class Even(nn.Module):
    """Both dimensions of each weight divide by 2 and by 3, as only the first may be uneven."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grow = nn.Linear(7, 12, bias=False, dtype=torch.float64)
        self.wide = nn.Linear(12, 18, bias=False, dtype=torch.float64)
        self.shrink = nn.Linear(18, 3, bias=False, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.shrink(self.wide(self.grow(inputs).tanh()).tanh())


def shard_columns(me: Rank) -> None:
    model = Even()
    placements = {model.wide.weight: Shard(1), model.shrink.weight: Shard(1)}
    fully_shard(model, mesh=line(me), shard_placement_fn=placements.get)
    assert model.wide.weight.placements == (Shard(1),)
    assert model.grow.weight.placements == (Shard(0),)
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(Even(), me.size))


@pytest.mark.parametrize("size", [2, 3])
def test_shard_columns(size, tmp_path):
    run(shard_columns, size, tmp_path)
