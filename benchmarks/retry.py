"""What does it cost that an all-reduce can be retried, and what when it is not?

    python benchmarks/retry.py [--ranks 8] [--rounds 15]

Microseconds per op, medians over rounds in which the two take turns; a round's time is that of its
slowest rank. `plain` is torch.distributed.all_reduce, `retried` torch_gpumode.distributed's, and
`difference` the median of what the latter took longer in the same round.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import torch_gpumode.distributed as gd
from torch_gpumode.bench.ranks import new_group, run_ranks

SIZES = {8: 500, 4096: 500, 65536: 200, 1 << 20: 50, 16 << 20: 8}  # bytes, and ops per round


def measure(rounds: int) -> list[tuple[int, float, float, float]]:
    """Size in bytes, seconds of a plain and of a retried op, and their difference."""
    group = new_group("gpumode")
    rows = []
    for nbytes, num_ops in SIZES.items():
        x = torch.randn(nbytes // 4)
        ways: list[Callable[[], object]] = [
            functools.partial(dist.all_reduce, x, group=group),
            functools.partial(gd.all_reduce, x, group=group),
        ]
        seconds = torch.empty(rounds + 1, 2, dtype=torch.float64)  # the first warms up
        for row in seconds:
            for column, way in enumerate(ways):
                dist.barrier()
                x.normal_()
                start = time.perf_counter()
                for _ in range(num_ops):
                    way()
                row[column] = (time.perf_counter() - start) / num_ops
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        plain, retried = seconds[1:].T.tolist()
        difference = statistics.median(b - a for a, b in zip(plain, retried, strict=True))
        rows.append((nbytes, statistics.median(plain), statistics.median(retried), difference))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = run_ranks(measure, args.ranks, args.rounds)[0]
    print(f"{args.ranks} ranks, torch {torch.__version__}, us")
    print(f"{'bytes':>10} {'plain':>10} {'retried':>10} {'difference':>10} {'ratio':>6}")
    for nbytes, plain, retried, difference in rows:
        print(
            f"{nbytes:10} {plain * 1e6:10.1f} {retried * 1e6:10.1f} {difference * 1e6:10.1f} "
            f"{retried / plain:6.2f}"
        )


if __name__ == "__main__":
    main()
