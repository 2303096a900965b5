"""How near to the memory's limit is an optimizer's step on a GPU, and what does its launch cost?

    python benchmarks/optim_gpu.py [--table shapes|kinds|clip|memory] [--compile] [--rounds 15]

Medians over rounds in which the contenders take turns, with new gradients in each. `GPU` is the
time on the device, while the host is ahead; `step` the time from the call to the end of the step
on the device, with both idle before. `of copy` compares GPU with torch's copy of as many bytes as
the step reads and writes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_gpumode import optim

Shapes = list[tuple[int, ...]]


def gpt2_xl() -> Shapes:
    d = 1600
    layer: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    layer += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 48, (d,), (d,)]


def llama_1b_eighth() -> Shapes:
    """Llama 3.2 1B, of each tensor the part of one of 8 ranks."""
    d, kv, ff = 2048, 512, 8192
    layer: Shapes = [
        (d // 8, d),
        (kv // 8, d),
        (kv // 8, d),
        (d // 8, d),
        (ff // 8, d),
        (ff // 8, d),
    ]
    layer += [(d // 8, ff), (d // 8,), (d // 8,)]
    return [(128256 // 8, d), *layer * 16, (d // 8,)]


SHAPES: dict[str, Shapes] = {
    "1 x 65 k": [(65_536,)],
    "6 x 100 k": [(100_000,)] * 6,
    "200 x 1 M": [(1_000_000,)] * 200,
    "1 x 268 M": [(1 << 28,)],
    "GPT-2 XL": gpt2_xl(),
    "Llama-1B / 8": llama_1b_eighth(),
    "2,000 x 1,024": [(1024,)] * 2000,
    "10,000 x 64": [(64,)] * 10_000,
}

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
U8 = torch.uint8
# Optimizer, its options, dtype of parameters and gradients, bytes read and written per element.
KINDS: dict[str, tuple[str, dict[str, Any], torch.dtype, int]] = {
    "AdamW fp32": ("AdamW", {}, F32, 28),
    "AdamW fp32, amsgrad": ("AdamW", {"amsgrad": True}, F32, 36),
    "AdamW fp64": ("AdamW", {}, F64, 56),
    "AdamW bf16, states fp32": ("AdamW", {}, BF16, 22),
    "AdamW bf16, stochastic": ("AdamW", {"stochastic_rounding": True}, BF16, 22),
    "AdamW bf16, states bf16": ("AdamW", {"state_dtype": BF16}, BF16, 14),
    "AdamW bf16, remainder16": ("AdamW", {"master": "remainder16"}, BF16, 26),
    "AdamW bf16, master fp32": ("AdamW", {"master": "fp32"}, BF16, 30),
    "AdamW fp16, master fp32": ("AdamW", {"master": "fp32"}, F16, 30),
    "AdamW fp32, 8 bits": ("AdamW", {"state_dtype": U8}, F32, 16),
    "AdamW bf16, 8 bits": ("AdamW", {"state_dtype": U8}, BF16, 10),
    "AdamW bf16, rem16, 8 bits": ("AdamW", {"state_dtype": U8, "master": "remainder16"}, BF16, 14),
    "AdamW bf16, fp32, 8 bits": ("AdamW", {"state_dtype": U8, "master": "fp32"}, BF16, 18),
    "Lion 8 bits": ("Lion", {"state_dtype": U8}, F32, 14),
    "SGD momentum": ("SGD", {"momentum": 0.9}, F32, 20),
    "SGD": ("SGD", {}, F32, 12),
    "Adagrad": ("Adagrad", {}, F32, 20),
    "RMSprop": ("RMSprop", {}, F32, 20),
    "Lion": ("Lion", {}, F32, 20),
    "LAMB": ("LAMB", {}, F32, 40),
    "NovoGrad": ("NovoGrad", {}, F32, 24),
}


class Case:
    """Parameters that all contenders update; each has its own states."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = F32) -> None:
        self.params = [Parameter(torch.randn(s, device="cuda").to(dtype)) for s in shapes]
        self.numel = sum(param.numel() for param in self.params)
        self._grads = [torch.randn_like(param) for param in self.params]
        self.new_grads()

    def new_grads(self) -> None:
        """Gives each parameter a gradient that no step has seen, without filling memory."""
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad.view(grad.shape)

    def move_grads(self) -> None:
        """The same, in new memory: small ones only."""
        for param in self.params:
            param.grad = torch.empty_like(param).normal_()


def gpu_seconds(run: Callable[[], Any], ahead: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(ahead)  # until the host has launched all of it
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def step_seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(
    ways: dict[str, Callable[[], Any]], before: Callable[[], None], rounds: int
) -> dict[str, tuple[float, float]]:
    """Returns the median seconds on the GPU, and of a step, by contender."""
    gpu: dict[str, list[float]] = {way: [] for way in ways}
    step: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):  # two warm up
        for way, run in ways.items():
            before()
            whole = step_seconds(run)
            before()
            on_gpu = gpu_seconds(run, ahead=int(min(whole, 0.1) * 2e9) + 200_000)
            if number >= 2:
                step[way].append(whole)
                gpu[way].append(on_gpu)
    median = statistics.median
    return {way: (median(gpu[way]), median(step[way])) for way in ways}


def copy_of(nbytes: int) -> Callable[[], Any]:
    """Returns a copy that reads and writes `nbytes` together."""
    source = torch.empty(max(4, nbytes // 8), device="cuda").normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def show(title: str, results: dict[str, tuple[float, float]], record: dict[str, Any]) -> None:
    copy = results.get("copy", (0.0, 0.0))[0]
    for way, (gpu, step) in results.items():
        of_copy = f"{copy / gpu:9.3f}" if copy else ""
        print(f"{title:26}{way:16}{gpu * 1e3:10.4f}{step * 1e3:10.4f}{of_copy}", flush=True)
        record.setdefault(title, {})[way] = {"gpu": gpu, "step": step, "of copy": copy / gpu}


def table_of_shapes(args: argparse.Namespace, record: dict[str, Any]) -> None:
    for title, shapes in SHAPES.items():
        if args.only and args.only not in title:
            continue
        case = Case(shapes)
        options: dict[str, Any] = {"lr": 1e-3}
        ours = optim.FusedAdamW(case.params, **options)
        ways: dict[str, Callable[[], Any]] = {"ours": ours.step}
        if len(shapes) in (146, 2000, 10_000):  # one tensor in each group
            groups = [{"params": [param]} for param in case.params[:465]]
            alone = optim.FusedAdamW(groups, **options)
            together = optim.FusedAdamW(case.params[:465], **options)
            ways["ours, <=465"] = together.step
            ways["ours, groups"] = alone.step
        ways["fused"] = torch.optim.AdamW(case.params, fused=True, **options).step
        if not args.fast:
            ways["foreach"] = torch.optim.AdamW(case.params, foreach=True, **options).step
        if not args.fast and case.numel < 10**9:
            ways["for loop"] = torch.optim.AdamW(case.params, foreach=False, **options).step
        if args.compile and len(shapes) < 600:
            compiled = torch.optim.AdamW(
                case.params, foreach=True, capturable=True, lr=torch.tensor(1e-3, device="cuda")
            )
            step = torch.compile(compiled.step, fullgraph=False)
            ways["compile"] = step
        ways["copy"] = copy_of(28 * case.numel)
        show(title, take_turns(ways, case.new_grads, args.rounds), record)
        if len(shapes) >= 2000:  # each gradient in new memory
            ways = {way: ways[way] for way in ("ours", "fused")}
            show(title + ", moved", take_turns(ways, case.move_grads, args.rounds), record)
        del ways, ours, case
        torch.cuda.empty_cache()


def table_of_kinds(args: argparse.Namespace, record: dict[str, Any]) -> None:
    for title, (name, options, dtype, nbytes) in KINDS.items():
        if args.only and args.only not in title:
            continue
        case = Case([(1 << 28,)], dtype)
        ours = getattr(optim, f"Fused{name}")(case.params, lr=1e-3, **options)
        ways: dict[str, Callable[[], Any]] = {"ours": ours.step}
        # torch's states have the parameter's dtype.
        same = {key: value for key, value in options.items() if key != "state_dtype"}
        is_same = dtype in (F32, F64) or options.get("state_dtype") == dtype
        if name in ("AdamW", "SGD") and is_same:
            theirs = getattr(torch.optim, name)
            ways["fused"] = theirs(case.params, lr=1e-3, fused=True, **same).step
        ways["copy"] = copy_of(nbytes * case.numel)
        show(title, take_turns(ways, case.new_grads, args.rounds), record)
        del ways, ours, case
        torch.cuda.empty_cache()


def table_of_clipping(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Unscale, clip and step: 32 bytes per element at least."""
    for title in ("1 x 268 M", "GPT-2 XL", "Llama-1B / 8"):
        case = Case(SHAPES[title])
        ways = {
            "ours": clipped_by_us(case),
            "fused": clipped_by_torch(case),
            "copy": copy_of(32 * case.numel),
        }
        show("clip: " + title, take_turns(ways, case.new_grads, args.rounds), record)
        del ways, case
        torch.cuda.empty_cache()


def clipped_by_us(case: Case) -> Callable[[], Any]:
    optimizer = optim.FusedAdamW(case.params, lr=1e-3)
    scaler = FakeScaler(optimizer)
    return lambda: optimizer.step(max_norm=1.0, scaler=scaler.again())


def clipped_by_torch(case: Case) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(case.params, lr=1e-3, fused=True)
    found_inf = torch.zeros((), device="cuda")
    inverse = torch.ones((), device="cuda")

    def step() -> None:
        grads: list[Tensor] = [p.grad for p in case.params]  # type: ignore[misc]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        torch.nn.utils.clip_grad_norm_(case.params, 1.0, foreach=True)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()

    return step


class FakeScaler:
    """A GradScaler before each step, of which `update` need not be timed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
        self._scaler.scale(torch.ones((), device="cuda"))
        self._optimizer = optimizer

    def again(self) -> torch.amp.GradScaler:
        self._scaler._per_optimizer_states.pop(id(self._optimizer), None)
        return self._scaler


def resting_and_peak(make: Callable[[list[Parameter]], Any], shapes: Shapes) -> tuple[int, int]:
    """Returns the bytes allocated beyond parameters and gradients, between steps and in one."""
    gc.collect()
    torch.cuda.empty_cache()
    case = Case(shapes)
    before = torch.cuda.memory_allocated()
    step = make(case.params)
    step()
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    step()
    return resting, torch.cuda.max_memory_allocated() - before


def table_of_memory(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Bytes beyond those of torch's fused AdamW between steps, which has nothing but states."""

    def torchs(params: list[Parameter]) -> Any:
        return torch.optim.AdamW(params, fused=True).step

    def ours(params: list[Parameter]) -> Any:
        return optim.FusedAdamW(params).step

    def clipping(params: list[Parameter]) -> Any:
        return functools.partial(optim.FusedAdamW(params).step, max_norm=1.0)

    def lamb(params: list[Parameter]) -> Any:
        return optim.FusedLAMB(params).step

    for title, shapes in SHAPES.items():
        states, _ = resting_and_peak(torchs, shapes)
        allowed = 0.002 * 4 * sum(map(math.prod, shapes)) + 128 * len(shapes)
        for name, make in {"AdamW": ours, "AdamW, clip": clipping, "LAMB": lamb}.items():
            resting, peak = resting_and_peak(make, shapes)
            beyond = {"resting": resting - states, "peak": peak - states, "allowed": allowed}
            print(
                f"{title:26}{name:16}" + "".join(f"{key} {n:12.0f} " for key, n in beyond.items())
            )
            record[f"{title}, {name}"] = beyond


TABLES = {
    "shapes": table_of_shapes,
    "kinds": table_of_kinds,
    "clip": table_of_clipping,
    "memory": table_of_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=TABLES, default="shapes")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too (minutes)")
    parser.add_argument("--fast", action="store_true", help="neither foreach nor the loop")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where results go, too")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if args.table != "memory":
        print(f"{'':26}{'':16}{'GPU, ms':>10}{'step, ms':>10}{'of copy':>9}")
    record: dict[str, Any] = {}
    TABLES[args.table](args, record)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
