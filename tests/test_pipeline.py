"""Case B3: pipeline schedules, whose batches of sends and receives must not wait for each other."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from _ranks import Rank, run
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

NUM_MICROBATCHES = 6


def layer(index: int) -> torch.nn.Module:
    torch.manual_seed(index)
    return torch.nn.Linear(8, 8)


def train(me: Rank, schedule_class: type, stages_per_rank: int) -> None:
    num_stages = me.size * stages_per_rank
    layers = [layer(i) for i in range(num_stages)]
    mine = range(me.rank, num_stages, me.size)
    stages = [
        PipelineStage(copy.deepcopy(layers[i]), i, num_stages, torch.device("cpu")) for i in mine
    ]
    schedule = schedule_class(
        stages if stages_per_rank > 1 else stages[0],
        NUM_MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().sum(),
        scale_grads=False,
    )
    torch.manual_seed(100)
    inputs, targets = torch.randn(2 * NUM_MICROBATCHES, 8), torch.randn(2 * NUM_MICROBATCHES, 8)
    first, last = me.rank == 0, num_stages - 1 in mine
    schedule.step(*([inputs] if first else []), **({"target": targets} if last else {}))

    (torch.nn.Sequential(*layers)(inputs) - targets).square().sum().backward()
    for stage, i in zip(stages, mine, strict=True):
        torch.testing.assert_close(stage.submod.weight.grad, layers[i].weight.grad)
    dist.barrier()


def schedules(me: Rank) -> None:
    train(me, ScheduleGPipe, 1)
    train(me, Schedule1F1B, 1)
    train(me, ScheduleInterleaved1F1B, 2)


def test_schedules(tmp_path):
    run(schedules, 3, tmp_path)
