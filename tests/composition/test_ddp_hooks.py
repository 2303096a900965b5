"""DDP's communication hooks: torch's own, in Python and in C++, and hooks that chain futures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from _values import digest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

# DDP compares the annotations of a hook with types, and here they would be strings.


def bf16_compress(state, bucket):
    """torch refuses its own, by name, where there is no NCCL."""
    return default_hooks.bf16_compress_hook(None, bucket)


def bf16_compress_allreduce(state, bucket):
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(None, bucket)


def chained(state, bucket):
    """Each link changes the value, and the last undoes it all."""
    size = dist.get_world_size()
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return (
        future.then(lambda done: done.value()[0] / size + 3)
        .then(lambda done: done.value() * 2)
        .then(lambda done: [done.value(), done.value() - 6])
        .then(lambda done: done.value()[1] / 2)
    )


def gathered(state, bucket):
    mine = bucket.buffer().clone()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, mine, async_op=True)
    return work.get_future().then(lambda _: torch.stack(parts).mean(0))


def in_halves(state, bucket):
    """Two ops for a bucket, whose futures are collected."""
    buffer = bucket.buffer()
    futures = [
        dist.all_reduce(half, dist.ReduceOp.AVG, async_op=True).get_future()
        for half in buffer.tensor_split(2)
    ]
    return torch.futures.collect_all(futures).then(lambda _: buffer)


def at_once(state, bucket):
    """The future is complete when the hook returns."""
    dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def reduced_twice(state, bucket):
    """A link of the chain starts an op of its own, and waits for its future."""
    size = dist.get_world_size()

    def again(done: Future) -> torch.Tensor:
        return dist.all_reduce(done.value()[0] / size**2, async_op=True).get_future().wait()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


# With the error relative to the largest gradient. A link that starts an op needs a single bucket:
# with several, nothing would order these ops between the ranks.
HOOKS: dict[str, tuple[Callable, float]] = {
    "allreduce": (default_hooks.allreduce_hook, 1e-12),
    "fp16": (default_hooks.fp16_compress_hook, 2e-3),
    "fp16 wrapper": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        2e-3,
    ),
    "bf16": (bf16_compress, 2e-2),
    "bf16 wrapper": (bf16_compress_allreduce, 2e-2),
    "chained": (chained, 1e-12),
    "gathered": (gathered, 1e-12),
    "in halves": (in_halves, 1e-12),
    "at once": (at_once, 1e-12),
    "reduced twice": (reduced_twice, 1e-12),
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    largest = max(grad.abs().max().item() for grad in gradients(reference))
    for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * largest)


def averages(me: Rank, name: str, register: Callable[[DDP], None], tolerance: float) -> str:
    model = DDP(mlp(), bucket_cap_mb=25 if name == "reduced twice" else 1e-5)
    register(model)
    reduced = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, me.rank, step).backward()
        reference = mlp()
        for rank in range(me.size):
            (loss_of(reference, rank, step) / me.size).backward()
        assert_same_gradients(model, reference, tolerance)
        reduced += gradients(model)
    return digest(reduced)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_hook(name, size, tmp_path):
    hook, tolerance = HOOKS[name]

    def register(model: DDP) -> None:
        model.register_comm_hook(None, hook)

    assert len(set(run(averages, size, tmp_path, name, register, tolerance, limit_s=30))) == 1


BUILT_IN = {
    dist.BuiltinCommHookType.ALLREDUCE: 1e-12,
    dist.BuiltinCommHookType.FP16_COMPRESS: 2e-3,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", BUILT_IN, ids=str)
def test_built_in(kind, size, tmp_path):
    def register(model: DDP) -> None:
        model._register_builtin_comm_hook(kind)

    assert len(set(run(averages, size, tmp_path, str(kind), register, BUILT_IN[kind]))) == 1


class Recorder:
    """Runs PowerSGD, and keeps what each bucket's error has to be."""

    def __init__(self, state: PowerSGDState) -> None:
        self.state, self.errors = state, []

    def hook(self, _, bucket):
        state = self.state
        compressed = state.iter >= state.start_powerSGD_iter
        given = bucket.buffer() + state.error_dict.get(bucket.index(), 0)

        def record(done: Future[torch.Tensor]) -> torch.Tensor:
            if compressed:
                self.errors.append((given - done.value(), state.error_dict[bucket.index()]))
            return done.value()

        return powerSGD_hook(state, bucket).then(record)


def power_sgd(me: Rank) -> str:
    """The compressed gradients are the same on all ranks; what got lost is fed back, exactly."""
    model = DDP(mlp())
    recorder = Recorder(PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0))
    model.register_comm_hook(None, recorder.hook)
    train(model, sgd(model), me.rank, steps=5)
    assert len(recorder.errors) == 3
    for expected, error in recorder.errors:
        assert error.abs().max() > 1e-3
        assert torch.equal(error, expected)
    state = recorder.state
    assert state.compression_stats()[0] > 1.5
    shared = [*state.p_memory_dict.values(), *state.q_memory_dict.values()]
    return digest([*model.parameters(), *shared])


def power_sgd_of_full_rank(me: Rank) -> str:
    """With matrices of full rank nothing gets lost."""
    model = DDP(mlp())
    state = PowerSGDState(None, 11, start_powerSGD_iter=2, min_compression_rate=0)
    model.register_comm_hook(state, powerSGD_hook)
    train(model, sgd(model), me.rank, steps=5)
    assert state.p_memory_dict
    assert_same(model, train_alone(mlp(), me.size, steps=5), tolerance=1e-9)
    return digest(list(model.parameters()))


def power_sgd_beside_gloo(me: Rank) -> str:
    gloo = dist.new_group(backend="gloo")
    models = []
    for group in (dist.group.WORLD, gloo):
        model = DDP(mlp(), process_group=group)
        state = PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook)
        train(model, sgd(model), me.rank, steps=5)
        models.append(model)
    assert_same(*models, tolerance=1e-9)
    return digest(list(models[0].parameters()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [power_sgd, power_sgd_of_full_rank, power_sgd_beside_gloo])
def test_power_sgd(function, size, tmp_path):
    assert len(set(run(function, size, tmp_path, limit_s=30))) == 1


def post_local_sgd(me: Rank) -> None:
    """Two steps together, then by subgroup, with an average of the parameters every other step."""
    parts = [[0, 1], [2]] if me.size == 3 else [[0], [1]]
    part_of = {rank: part for part in parts for rank in part}
    mine, _ = dist.new_subgroups_by_enumeration(parts)
    model = DDP(mlp())
    state = PostLocalSGDState(None, mine, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    train(model, PostLocalSGDOptimizer(sgd(model), averager), me.rank, steps=6)

    replicas = [mlp() for _ in range(me.size)]
    optimizers = [sgd(replica) for replica in replicas]
    for step in range(6):
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            together = part_of[rank] if step >= 2 else range(me.size)
            for other in together:
                (loss_of(replica, other, step) / len(together)).backward()
            optimizers[rank].step()
        if step in (2, 4):
            for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = torch.stack([each.detach() for each in copies]).mean(0)
                for each in copies:
                    each.data.copy_(mean)
    assert_same(model, replicas[me.rank])


def optimizer_in_hook(me: Rank) -> None:
    """The optimizer steps each parameter when its bucket has been reduced."""
    model, fused = DDP(mlp(), bucket_cap_mb=1e-5), DDP(mlp(), bucket_cap_mb=1e-5)
    functional = _FunctionalSGD([], lr=0.3, momentum=0.9, _allow_empty_param_list=True)
    hook = _hook_then_optimizer(default_hooks.allreduce_hook, _OptimizerHookState(functional))
    model.register_comm_hook(None, hook)
    fused._register_fused_optim(torch.optim.SGD, lr=0.3, momentum=0.9)
    for each in (model, fused):
        for step in range(4):
            each.zero_grad()
            loss_of(each, me.rank, step).backward()
        assert_same(each, train_alone(mlp(), me.size, steps=4))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [post_local_sgd, optimizer_in_hook])
def test_with_optimizer(function, size, tmp_path):
    run(function, size, tmp_path)


def raise_in_a_link(me: Rank) -> None:
    """backward raises where a link of the chain does; the group, and the model, go on."""

    def fail_on_rank_0(_, bucket):
        def link(done: Future) -> torch.Tensor:
            if me.rank == 0 and failing:
                raise ValueError("a link that breaks")
            return done.value()[0] / me.size

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(link)

    model, failing = DDP(mlp()), False
    model.register_comm_hook(None, fail_on_rank_0)
    train(model, sgd(model), me.rank)
    failing = True
    if me.rank == 0:
        with pytest.raises(RuntimeError, match="a link that breaks"):
            loss_of(model, 0).backward()
    else:
        loss_of(model, me.rank).backward()
    failing = False
    model.module.load_state_dict(mlp().state_dict())
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


def test_raise_in_a_link(tmp_path):
    run(raise_in_a_link, 3, tmp_path)
