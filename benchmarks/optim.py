"""How near to the memory's limit is an optimizer's step, and how much is overhead?

    python benchmarks/optim.py [--optimizer AdamW] [--threads 1] [--rounds 15]

Milliseconds of the whole step, medians over rounds in which the contenders take turns. `one` is
ours on one tensor of as many elements, and `x one` how much longer many take; `copy` is torch's
copy of as many bytes as the step moves, half of them read. Gradients are new in every step.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_gpumode import optim

SHAPES = [(1, 65_536), (6, 100_000), (1, 16 << 20), (2_000, 1_024), (10_000, 64)]  # tensors, numel
# Bytes per element of parameters, gradients and states in float32, read and written.
BYTES = {"AdamW": 28, "Adam": 28, "SGD": 20, "Adagrad": 20, "RMSprop": 20}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}


def contenders(name: str, num_tensors: int, numel: int) -> dict[str, torch.optim.Optimizer]:
    def parameters(num: int = num_tensors) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(num_tensors * numel // num)) for _ in range(num)]

    torchs, ours = getattr(torch.optim, name), getattr(optim, f"Fused{name}")
    options = {"lr": 1e-3, **OPTIONS.get(name, {})}
    made = {
        "for loop": torchs(parameters(), foreach=False, **options),
        "foreach": torchs(parameters(), foreach=True, **options),
        "ours": ours(parameters(), **options),
        "one": ours(parameters(1), **options),
    }
    if name != "RMSprop":  # torch has no fused one
        made["fused"] = torchs(parameters(), fused=True, **options)
    return made


def measure(name: str, num_tensors: int, numel: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds of a step, by contender, and of the copy."""
    source = torch.randn(BYTES[name] * num_tensors * numel // 8)
    target = torch.empty_like(source)
    optimizers = contenders(name, num_tensors, numel)
    ways: dict[str, Callable[[], Any]] = {way: made.step for way, made in optimizers.items()}
    ways["copy"] = functools.partial(target.copy_, source)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first warms up
        for made in optimizers.values():
            for param in made.param_groups[0]["params"]:
                param.grad = torch.randn_like(param)
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(times[1:]) for way, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=BYTES, default="AdamW")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.optimizer}, torch {torch.__version__}, cpu, {args.threads} threads, ms")
    columns = ("for loop", "foreach", "fused", "ours", "one", "copy")
    print("tensors x numel".ljust(18) + "".join(f"{c:>10}" for c in (*columns, "x one")))
    for num_tensors, numel in SHAPES:
        times = measure(args.optimizer, num_tensors, numel, args.rounds)
        cells = [f"{times[c] * 1e3:10.3f}" if c in times else " " * 10 for c in columns]
        ratio = times["ours"] / times["one"]
        print(f"{num_tensors} x {numel}".ljust(18) + "".join(cells) + f"{ratio:10.2f}")


if __name__ == "__main__":
    main()
