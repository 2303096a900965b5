"""Tries an installed torch_gpumode on three CPU ranks: all-reduce, lose one, rebuild, all-reduce.

    python tests/wheel_smoke.py

A program, not a test of the suite: it runs with whatever torch and Python a wheel was built for,
and needs nothing else.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_gpumode.distributed
from torch_gpumode import _extension

WORLD_SIZE = 3
VICTIM = 1
TIMEOUT_S = 60


def all_reduce(ranks: list[int]) -> None:
    """Sums 1,000,003 values over the ranks that are left, known by their first numbers."""
    values = torch.arange(1_000_003, dtype=torch.float64) * (int(os.environ["SMOKE_RANK"]) + 1)
    dist.all_reduce(values)
    factor = sum(rank + 1 for rank in ranks)
    assert torch.equal(values, torch.arange(1_000_003, dtype=torch.float64) * factor)


def run_rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gpumode",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    all_reduce(list(range(WORLD_SIZE)))
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    lost: list[int] = []
    try:
        dist.all_reduce(torch.ones(4))
    except torch_gpumode.distributed.PeerLost as error:
        lost = error.ranks
    lost_ms = (time.monotonic() - start) * 1e3
    assert lost == [VICTIM], lost
    start = time.monotonic()
    torch_gpumode.distributed.rebuild()
    rebuilt_ms = (time.monotonic() - start) * 1e3
    assert dist.get_world_size() == WORLD_SIZE - 1
    all_reduce([r for r in range(WORLD_SIZE) if r != VICTIM])
    dist.destroy_process_group()
    print(f"rank {rank}: PeerLost after {lost_ms:.1f} ms, rebuilt in {rebuilt_ms:.1f} ms")


def main() -> None:
    if len(sys.argv) == 3:
        return run_rank(int(sys.argv[1]), sys.argv[2])
    print(f"torch {torch.__version__}, {torch_gpumode.__path__[0]}: {_extension.build_info()}")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder],
                env=os.environ | {"SMOKE_RANK": str(rank)},
            )
            for rank in range(WORLD_SIZE)
        ]
        codes = [process.wait(timeout=2 * TIMEOUT_S) for process in ranks]
    expected = [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(WORLD_SIZE)]
    if codes != expected:
        sys.exit(f"exit codes are {codes}, should be {expected}")
    print("ok")
    return None


if __name__ == "__main__":
    main()
