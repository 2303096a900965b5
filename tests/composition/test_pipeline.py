"""Case B3: pipeline schedules, whose batches of sends and receives must not wait for each other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    schedules,
    stage,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

NUM_MICROBATCHES, MICROBATCH, NUM_STEPS = 8, 2, 3

# The schedule, stages per rank, and whether they lie along a V: the first rank has the last one.
SCHEDULES = {
    "GPipe": (ScheduleGPipe, 1, False),
    "1F1B": (Schedule1F1B, 1, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2, False),
    "LoopedBFS": (ScheduleLoopedBFS, 2, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2, False),
    # Up to torch 2.12 a rank sends to itself at the turn of the V.
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (schedules.ScheduleDualPipeV, 2, True),
}


class Layer(nn.Module):
    """Passes on two tensors, whose shapes are others at each stage and of each other."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        make = functools.partial(nn.Linear, dtype=torch.float64)
        self.is_last = index == num_stages - 1
        self.left, self.right = make(3 + index, 4 + index), make(5, 5)
        self.mix = make(3 + index, 5)

    def forward(self, left: torch.Tensor, right: torch.Tensor):
        right = self.right(right).tanh() + self.mix(left).unsqueeze(1)
        left = self.left(left).tanh()
        return left * right.mean((1, 2)).unsqueeze(1) if self.is_last else (left, right)


def batch(step: int, index: int, num_stages: int) -> list[torch.Tensor]:
    """The inputs of the first stage, and the targets of the last."""
    generator = torch.Generator().manual_seed(100 * step + index)
    count = NUM_MICROBATCHES * MICROBATCH
    shapes = [(count, 3), (count, 2, 5), (count, 3 + num_stages)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def losses_alone(layers: list[nn.Module], step: int, index: int) -> torch.Tensor:
    """Returns the loss of each microbatch, of all layers one after the other."""
    left, right, target = batch(step, index, len(layers))
    outputs = (left, right)
    for layer in layers:
        outputs = layer(*outputs)
    parts = zip(outputs.split(MICROBATCH), target.split(MICROBATCH), strict=True)
    return torch.stack([loss_fn(*part) for part in parts])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, msg=lambda m: f"{what}: {m}")


def train(
    me: Rank,
    name: str,
    group: dist.ProcessGroup | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    num_data: int = 1,
    data_index: int = 0,
) -> None:
    """A few steps of a pipeline on a group; beside it the same layers on this rank alone."""
    schedule_class, stages_per_rank, is_v = SCHEDULES[name]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_stages = size * stages_per_rank
    layers = [Layer(i, num_stages) for i in range(num_stages)]
    mine = [rank, num_stages - 1 - rank] if is_v else list(range(rank, num_stages, size))
    modules = [wrap(copy.deepcopy(layers[i])) for i in mine]
    stages = [
        PipelineStage(module, i, num_stages, torch.device("cpu"), group=group)
        for i, module in zip(mine, modules, strict=True)
    ]
    schedule = schedule_class(
        stages if stages_per_rank > 1 else stages[0], NUM_MICROBATCHES, loss_fn=loss_fn
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.3, momentum=0.9) for m in (*modules, *layers)]

    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = [losses_alone(layers, step, i) for i in range(num_data)]
        torch.cat(expected).mean().backward()
        *inputs, targets = batch(step, data_index, num_stages)
        losses: list[torch.Tensor] = []
        is_last = num_stages - 1 in mine
        schedule.step(
            *(inputs if 0 in mine else []),
            **({"target": targets, "losses": losses} if is_last else {}),
        )
        if is_last:
            what = f"{name}: losses of step {step}"
            assert_close(torch.stack(losses).detach(), expected[data_index].detach(), what)
        for i, module in zip(mine, modules, strict=True):
            pairs = zip(module.parameters(), layers[i].named_parameters(), strict=True)
            for ours, (key, theirs) in pairs:
                assert_close(ours.grad, theirs.grad, f"{name}: {key} of stage {i}, step {step}")
        for optimizer in optimizers:
            optimizer.step()


def every_schedule(me: Rank) -> None:
    for name in SCHEDULES:
        train(me, name)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_schedules(size, tmp_path):
    run(every_schedule, size, tmp_path)


def with_data_parallel(me: Rank, style: str, names: list[str]) -> None:
    """Two pipelines of two ranks; the gradients of a stage are averaged over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    wrap = {
        "ddp": functools.partial(
            DistributedDataParallel,
            process_group=mesh.get_group("data"),
            bucket_cap_mb=1e-4,
            # Else DDP orders its buckets anew, and torch's trial of a stage has confused it.
            find_unused_parameters=True,
        ),
        "fsdp": functools.partial(fully_shard, mesh=mesh["data"]),
    }[style]
    index = mesh.get_local_rank("data")
    for name in names:
        train(me, name, mesh.get_group("stage"), wrap, num_data=2, data_index=index)
    dist.barrier()


@pytest.mark.parametrize(
    ("style", "names"),
    [
        # torch's zero-bubble schedules run parts of a backward pass, which DDP does not see.
        ("ddp", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]),
        ("fsdp", list(SCHEDULES)),
    ],
)
def test_with_data_parallel(style, names, tmp_path):
    run(with_data_parallel, 4, tmp_path, style, names)


def shapes_given(me: Rank) -> None:
    """No shapes are exchanged first; and evaluation, which returns the merged outputs."""
    last = me.rank == me.size - 1
    layers = [Layer(i, me.size) for i in range(me.size)]
    left, right, target = batch(0, 0, me.size)
    activations = [(left, right)]
    for layer in layers:
        activations.append(layer(*activations[-1]))
    inputs = activations[me.rank]
    mine = PipelineStage(
        layers[me.rank],
        me.rank,
        me.size,
        torch.device("cpu"),
        input_args=tuple(each[:MICROBATCH].detach() for each in inputs),
        output_args=layers[me.rank](*(each[:MICROBATCH] for each in inputs)),
    )
    schedule = ScheduleGPipe(mine, NUM_MICROBATCHES, loss_fn=loss_fn)
    output = schedule.eval(
        *((left, right) if me.rank == 0 else ()), **({"target": target} if last else {})
    )
    if last:
        assert_close(output, activations[-1], "outputs of an evaluation")


def test_shapes_given(tmp_path):
    run(shapes_given, 3, tmp_path)


def two_directions(me: Rank) -> None:
    """From torch 2.14 on a stage may split its group in two: one forwards, one backwards."""
    # There need not be such a device: what is tested is that the backend splits.
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    torch.distributed.config.pipeline_per_direction_p2p = True
    for name in SCHEDULES:
        train(me, name)


@pytest.mark.skipif(
    not hasattr(stage, "_build_p2p_direction_groups"), reason="torch before 2.14 has one group"
)
def test_two_directions(tmp_path):
    run(two_directions, 3, tmp_path)
