"""How long does it take the others to go on when a rank is killed in the middle of an all-reduce?

    python benchmarks/recovery.py [--ranks 2,4,8,16] [--rounds 50] [--nbytes 1M]

Each round forks fresh ranks that do one all-reduce after the other; a random one is SIGKILLed at a
random moment. The ways to go on take turns:

    retry      torch_gpumode.distributed.all_reduce: nothing to do
    rebuild    all_reduce raises, then torch_gpumode.distributed.rebuild()
    gloo       all_reduce raises, then Gloo's own reconfigure (torch 2.14), which must be told who
               is left: here by a process that knows

Moments are of CLOCK_MONOTONIC, which all processes of a host share, in ms since the kill. The
slowest survivor of a round counts:

    raised     all_reduce has raised
    agreed     it is decided who is left
    rebuilt    the group is rebuilt
    result     the next all-reduce is done

The rows are appended to results/recovery.csv, or to another file: --csv.

A survivor of Gloo that waits for no bytes of the dead rank is not told, and raises when its timeout
is over: such rounds are counted as `untold`, and the times are of the others.
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import torch_gpumode.distributed as gd
from torch_gpumode.bench import table
from torch_gpumode.bench.collectives import parse_size

RESULTS = Path(__file__).parent / "results"
WAIT_S = 60.0
GLOO_TIMEOUT_S = 3.0
WAYS = ["retry", "rebuild", "gloo"] if hasattr(dist, "_reconfigure") else ["retry", "rebuild"]

fork = multiprocessing.get_context("fork")  # from here, where torch and the extension are loaded
Moments = dict[str, float]


def start(function: Callable[..., None], *args: Any) -> tuple[multiprocessing.Process, Connection]:
    pipe, end = fork.Pipe()
    process = fork.Process(target=function, args=(end, *args), daemon=True)
    process.start()
    end.close()
    return process, pipe  # type: ignore[return-value]


def serve_store(end: Connection) -> None:
    """A process of its own, so that ranks are forked from one that has no threads."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    end.recv()


def rank_main(
    end: Connection, way: str, port: int, name: str, rank: int, ranks: int, count: int
) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("localhost", port, is_master=False))
    world: dict[str, Any] = {"store": store, "rank": rank, "world_size": ranks}
    if way == "gloo":
        timeout = timedelta(seconds=GLOO_TIMEOUT_S)
        dist.init_process_group("gloo", **world, enable_reconfigure=True, timeout=timeout)
        end.send(dist._get_reconfigure_handle())
        dist._reconfigure(uuid=1, handles=end.recv()).wait()
    else:
        dist.init_process_group("gpumode", **world)
    x = torch.rand(count)
    dist.all_reduce(x.clone())
    end.send("ready")
    moments = {"retry": retried, "rebuild": rebuilt, "gloo": reconfigured}[way](end, x)
    sums = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, x)
    right = bool((y_of(sums) == moments.pop("sum")).all()) if way != "gloo" else True
    end.send((moments, right))


def y_of(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Their sum as all_reduce makes it: in rank order."""
    total = inputs[0].clone()
    for each in inputs[1:]:
        total += each
    return total


def until_it_raises(x: torch.Tensor) -> float:
    while True:
        try:
            dist.all_reduce(x.clone())
        except Exception:  # Gloo's is a RuntimeError
            return time.monotonic()


def retried(end: Connection, x: torch.Tensor) -> dict[str, Any]:
    ranks = dist.get_world_size()
    while True:
        y = x.clone()
        outcome = gd.all_reduce(y)
        if len(outcome.contributors) < ranks:
            return {"result": time.monotonic(), "sum": y}


def rebuilt(end: Connection, x: torch.Tensor) -> dict[str, Any]:
    moments: dict[str, Any] = {"raised": until_it_raises(x)}
    # What rebuild() does, but for torch's tables of ranks, which nobody reads here.
    backend: Any = gd._groups.backend_of(None)
    attempt = backend.begin_rebuild(timedelta(seconds=WAIT_S), 1)
    while (pause := attempt.step()) is not None:
        if attempt.agreed():
            moments.setdefault("agreed", time.monotonic())
        time.sleep(pause)
    attempt.close()
    moments["rebuilt"] = time.monotonic()
    y = x.clone()
    dist.all_reduce(y)
    return moments | {"result": time.monotonic(), "sum": y}


def reconfigured(end: Connection, x: torch.Tensor) -> dict[str, Any]:
    moments: dict[str, Any] = {"raised": until_it_raises(x)}
    end.send(dist._get_reconfigure_handle())  # a new one
    dist._reconfigure(uuid=2, handles=end.recv()).wait()
    moments["rebuilt"] = time.monotonic()
    dist.all_reduce(x.clone())
    return moments | {"result": time.monotonic()}


def one_round(way: str, port: int, name: str, ranks: int, count: int) -> tuple[Moments, bool]:
    """ms since the kill of what happened last on a survivor, and whether all were told."""
    started = [start(rank_main, way, port, name, rank, ranks, count) for rank in range(ranks)]
    try:
        if way == "gloo":
            exchange_handles(started)
        for _, pipe in started:
            receive(pipe)
        time.sleep(random.uniform(0.05, 0.2))
        victim, _ = started.pop(random.randrange(ranks))
        killed = time.monotonic()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        if way == "gloo":
            exchange_handles(started)
        reports = [receive(pipe) for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    if not all(right for _, right in reports):
        raise RuntimeError("the all-reduce after the loss gave wrong values")
    moments = {event: max(each[event] for each, _ in reports) - killed for event in reports[0][0]}
    told = way != "gloo" or moments["raised"] < GLOO_TIMEOUT_S / 2
    return {event: 1e3 * seconds for event, seconds in moments.items()}, told


def exchange_handles(started: list[tuple[multiprocessing.Process, Connection]]) -> None:
    handles = [receive(pipe) for _, pipe in started]
    for _, pipe in started:
        pipe.send(handles)


def receive(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a rank said nothing for {WAIT_S} s")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description="SIGKILL in an all-reduce, and going on")
    parser.add_argument("--ranks", default="2,4,8,16", help="worlds, separated by commas")
    parser.add_argument("--rounds", type=int, default=50, help="of each way, in each world")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {WAYS}")
    parser.add_argument("--nbytes", type=parse_size, default=2**20, help="of the all-reduce")
    parser.add_argument("--csv", type=Path, default=RESULTS / "recovery.csv")
    args = parser.parse_args()
    worlds = [int(ranks) for ranks in args.ranks.split(",")]
    ways = args.ways.split(",")
    if min(worlds) < 2 or args.rounds < 1 or args.nbytes < 4 or not set(ways) <= set(WAYS):
        parser.error("--ranks must be 2 or more, --rounds 1 or more, --nbytes 4 or more")

    random.seed(0)
    store, pipe = start(serve_store)
    port = receive(pipe)
    rows: list[dict[str, Any]] = []
    for ranks in worlds:
        results: dict[str, list[tuple[Moments, bool]]] = {way: [] for way in ways}
        for i in tqdm(range(args.rounds), unit="kill of each way", desc=f"{ranks} ranks"):
            for way in ways:
                name = f"{way} {ranks} {i}"
                results[way].append(one_round(way, port, name, ranks, args.nbytes // 4))
        rows += [row for way in ways for row in summary(way, ranks, args.nbytes, results[way])]
    store.kill()
    print(table.plain_table(list(rows[0]), [list(row.values()) for row in rows]))
    context = table.provenance()
    table.append_csv(args.csv, ({**context, **row} for row in rows))


def summary(
    way: str, ranks: int, nbytes: int, results: list[tuple[Moments, bool]]
) -> list[dict[str, Any]]:
    rows = []
    of_the_told = [moments for moments, told in results if told]
    for event in results[0][0]:
        ms = sorted(moments[event] for moments in of_the_told) or [float("nan")]
        rows.append(
            {
                "way": way,
                "event": event,
                "ranks": ranks,
                "nbytes": nbytes,
                "rounds": len(results),
                "untold": len(results) - len(of_the_told),
                "median_ms": statistics.median(ms),
                "p90_ms": ms[int(0.9 * (len(ms) - 1))],
                "worst_ms": ms[-1],
            }
        )
    return rows


if __name__ == "__main__":
    main()
