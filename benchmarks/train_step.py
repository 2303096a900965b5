"""What does a small training step cost, and one call to all_reduce, beside Gloo in the same run?

    python benchmarks/train_step.py [--ranks 2] [--rounds 15]

Milliseconds, medians over rounds in which the backends alternate; a round's time is that of its
slowest rank.

    call, sync     all_reduce of 8 bytes, from the call until it returns
    call, async    the same with async_op=True: until the work is there, without the wait
    DDP            forward, backward and SGD of a small MLP (1.1 M parameters, one bucket and many)
    FSDP2          the same model, each layer and the root sharded
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_gpumode.bench.ranks import new_group, run_ranks

BACKENDS = ["gloo", "gpumode"]
Step = Callable[[], float]  # does one and returns its seconds


def timed(function: Callable[[], object]) -> Step:
    def step() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return step


def sync_call(group: dist.ProcessGroup) -> Step:
    x = torch.randn(2)
    return timed(lambda: dist.all_reduce(x, group=group))


def async_call(group: dist.ProcessGroup) -> Step:
    x = torch.randn(2)

    def step() -> float:
        start = time.perf_counter()
        work = dist.all_reduce(x, group=group, async_op=True)
        seconds = time.perf_counter() - start
        work.wait()
        return seconds

    return step


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(512, 512), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))


def training(module: torch.nn.Module) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x = torch.randn(16, 512)

    def step() -> None:
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def ddp(bucket_mb: float) -> Callable[[dist.ProcessGroup], Step]:
    def make(group: dist.ProcessGroup) -> Step:
        return training(
            DistributedDataParallel(model(), process_group=group, bucket_cap_mb=bucket_mb)
        )

    return make


def fsdp(group: dist.ProcessGroup) -> Step:
    module = model()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return training(module)


CASES: dict[str, tuple[Callable[[dist.ProcessGroup], Step], int]] = {  # and steps per round
    "call, sync": (sync_call, 200),
    "call, async": (async_call, 200),
    "DDP, one bucket": (ddp(25), 20),
    "DDP, buckets of 1 MB": (ddp(1), 20),
    "FSDP2": (fsdp, 20),
}


def measure(rounds: int) -> list[tuple[str, float, float]]:
    """Seconds of one step with Gloo and with gpumode, per case."""
    groups = [new_group(backend) for backend in BACKENDS]
    rows = []
    for name, (make, num_steps) in CASES.items():
        steps = [make(group) for group in groups]
        seconds = torch.empty(rounds + 1, len(groups), dtype=torch.float64)  # the first warms up
        for row in seconds:
            for column, step in enumerate(steps):
                dist.barrier()
                row[column] = sum(step() for _ in range(num_steps)) / num_steps
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        gloo, ours = (statistics.median(column.tolist()) for column in seconds[1:].T)
        rows.append((name, gloo, ours))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = run_ranks(measure, args.ranks, args.rounds)[0]
    print(f"{args.ranks} ranks, torch {torch.__version__}, ms")
    print(f"{'':22} {'Gloo':>10} {'gpumode':>10} {'ratio':>8}")
    for name, gloo, ours in rows:
        print(f"{name:22} {gloo * 1e3:10.4f} {ours * 1e3:10.4f} {gloo / ours:8.2f}")


if __name__ == "__main__":
    main()
