"""Times of several contenders, measured alternately on all ranks."""

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_COPY_POOL_NBYTES = 2**26


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
    """Copies `nbytes` between two tensors: reads and writes that many each.

    Each call takes the next ones of a pool that no cache of a core holds, because what another
    rank has written is not there either.
    """
    num_tensors = max(1, _COPY_POOL_NBYTES // nbytes)
    sources = torch.ones(num_tensors, nbytes, dtype=torch.uint8)
    targets = torch.zeros(num_tensors, nbytes, dtype=torch.uint8)
    pairs = itertools.cycle(zip(targets, sources, strict=True))

    def copy() -> None:
        target, source = next(pairs)
        target.copy_(source)

    return copy
