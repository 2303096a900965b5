"""Times of several contenders, measured alternately on all ranks."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def time_alternately(
    contenders: dict[str, Callable[[], object]],
    *,
    iterations: int,
    warmup: int,
    rounds: int,
    control: dist.ProcessGroup,
) -> dict[str, float]:
    """Seconds per call of each contender: the median over rounds.

    A round gives each contender, one after the other, a stretch of `iterations` calls without a
    pause; its time is that of the slowest rank. Every stretch starts with a barrier and two calls
    that are not timed, which let ranks fall into step. Collective over `control`.
    """
    for call in contenders.values():
        for _ in range(warmup):
            call()
    seconds = torch.empty(rounds, len(contenders), dtype=torch.float64)
    for row in seconds:
        for column, call in enumerate(contenders.values()):
            dist.barrier(control)
            call()
            call()
            start = time.perf_counter()
            for _ in range(iterations):
                call()
            row[column] = (time.perf_counter() - start) / iterations
    dist.all_reduce(seconds, dist.ReduceOp.MAX, control)
    return {
        name: statistics.median(seconds[:, column].tolist())
        for column, name in enumerate(contenders)
    }


def copy_call(nbytes: int) -> Callable[[], object]:
    """Copies `nbytes` between two tensors: reads and writes that many each."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)
