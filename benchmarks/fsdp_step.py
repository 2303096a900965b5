"""What does an optimizer's step cost under FSDP2, on a model of Llama 3.2 1B's shapes?

    torchrun --nproc-per-node=2 benchmarks/fsdp_step.py [--json FILE]

Contenders update the same shards in turns, each after a backward pass of its own. `GPU` is the
time on the device, while the host is ahead; `step` the time from the call to the end of the step
on the device, with both idle before. Medians over rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from torch_gpumode import optim

SIZES = {"1b": (16, 2048, 512, 8192, 128_256), "small": (2, 64, 32, 128, 512)}
HEAD = 16  # of "small"; 64 otherwise


class Layer(nn.Module):
    def __init__(self, width: int, kv_width: int, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            proj(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        num_layers, width, kv_width, hidden, num_tokens = SIZES[size]
        head = HEAD if size == "small" else 64
        self.tokens = nn.Embedding(num_tokens, width)
        self.layers = nn.ModuleList(Layer(width, kv_width, hidden, head) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def gpu_seconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # until the host has launched all of it
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def step_seconds(run: Callable[[], Any], device: torch.device) -> float:
    dist.barrier()
    sync(device)
    start = time.perf_counter()
    run()
    sync(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    with device:
        model = Model(args.size)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    params = list(model.parameters())
    ours = optim.FusedAdamW(params, lr=1e-5)
    packed = optim.FusedAdamW(params, lr=1e-5, state_dtype=torch.uint8)
    fused = torch.optim.AdamW(params, lr=1e-5, fused=True)
    foreach = torch.optim.AdamW(params, lr=1e-5, foreach=True)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        fused.step()

    ways: dict[str, Callable[[], Any]] = {
        "ours": ours.step,
        "ours, 8 bits": packed.step,
        "torch fused": fused.step,
        "torch foreach": foreach.step,
        "ours, clipped": lambda: ours.step(max_norm=1.0),
        "torch fused, clipped": clip_and_step,
    }
    tokens = torch.randint(0, SIZES[args.size][-1], (1, 64), device=device)

    def new_grads() -> None:
        model.zero_grad()
        model(tokens).float().logsumexp(-1).mean().backward()

    times: dict[str, list[list[float]]] = {way: [[], []] for way in ways}
    for number in range(args.rounds + 2):  # two warm up
        for way, run in ways.items():
            new_grads()
            step = step_seconds(run, device)
            new_grads()
            gpu = gpu_seconds(run) if has_gpu else 0.0
            if number >= 2:
                times[way][0].append(gpu)
                times[way][1].append(step)
    medians = torch.tensor(
        [[statistics.median(each) for each in of_way] for of_way in times.values()],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    numel = sum(param.numel() for param in params)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {numel / 1e9:.3f} G")
        print(f"{'':24}{'GPU, ms':>10}{'step, ms':>10}")
        for way, (gpu, step) in zip(ways, medians.tolist(), strict=True):
            print(f"{way:24}{gpu * 1e3:10.3f}{step * 1e3:10.3f}")
        if args.json is not None:
            found = dict(zip(ways, medians.tolist(), strict=True))
            args.json.write_text(json.dumps({"numel": numel, "seconds": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
