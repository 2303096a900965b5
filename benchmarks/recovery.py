"""How long does it take the others to go on when a rank is killed in the middle of an all-reduce?

    python benchmarks/recovery.py [--ranks 8] [--rounds 50] [--nbytes 1M]

Each round forks fresh ranks that do one all-reduce after the other; a random one is SIGKILLed at a
random moment. Moments are of CLOCK_MONOTONIC, which all processes of a host share. The slowest
survivor of a round counts:

    raised      from the kill until all_reduce has raised
    rebuilt     from then (on all survivors) until the group is rebuilt
    went on     from then (on all survivors) until the next all_reduce is done
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import torch_gpumode.distributed
from torch_gpumode.bench import table
from torch_gpumode.bench.collectives import parse_size

RESULTS = Path(__file__).parent / "results"
WAIT_S = 60.0

fork = multiprocessing.get_context("fork")  # from here, where torch and the extension are loaded


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


def rank_main(end: Connection, port: int, name: str, rank: int, ranks: int, count: int) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("localhost", port, is_master=False))
    dist.init_process_group("gpumode", store=store, rank=rank, world_size=ranks)
    x = torch.zeros(count)
    dist.all_reduce(x)
    end.send("ready")
    while True:
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            raised, kind = time.monotonic(), type(error).__name__
            break
    torch_gpumode.distributed.rebuild()
    rebuilt = time.monotonic()
    y = torch.ones(count)
    dist.all_reduce(y)
    end.send((raised, rebuilt, time.monotonic(), kind, bool((y == ranks - 1).all())))


def one_round(
    port: int, name: str, ranks: int, count: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Milliseconds of each event, and what was raised."""
    started = [start(rank_main, port, name, rank, ranks, count) for rank in range(ranks)]
    try:
        for _, pipe in started:
            receive(pipe)
        time.sleep(random.uniform(0.05, 0.2))
        victim, _ = started.pop(random.randrange(ranks))
        killed = time.monotonic()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        reports = [receive(pipe) for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    raised, rebuilt, went_on, kinds, right = zip(*reports, strict=True)
    if not all(right):
        raise RuntimeError("the all-reduce after the rebuild gave wrong values")
    all_raised = max(raised)
    events = {
        "raised": all_raised - killed,
        "rebuilt": max(rebuilt) - all_raised,
        "went on": max(went_on) - all_raised,
    }
    return {event: 1e3 * seconds for event, seconds in events.items()}, kinds


def receive(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a rank said nothing for {WAIT_S} s")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description="SIGKILL in an all-reduce, and going on")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--nbytes", type=parse_size, default=2**20, help="of the all-reduce")
    parser.add_argument("--csv", type=Path, default=RESULTS / "recovery.csv")
    args = parser.parse_args()
    if args.ranks < 3 or args.rounds < 1 or args.nbytes < 4:
        parser.error("--ranks must be 3 or more, --rounds 1 or more, --nbytes 4 or more")

    random.seed(0)
    store, pipe = start(serve_store)
    port = receive(pipe)
    results = [
        one_round(port, f"round {i}", args.ranks, args.nbytes // 4)
        for i in tqdm(range(args.rounds), unit="kill")
    ]
    store.kill()

    rows = []
    for event in results[0][0]:
        ms = sorted(events[event] for events, _ in results)
        rows.append(
            {
                "event": event,
                "ranks": args.ranks,
                "nbytes": args.nbytes,
                "rounds": args.rounds,
                "median_ms": statistics.median(ms),
                "p90_ms": ms[int(0.9 * (len(ms) - 1))],
                "worst_ms": ms[-1],
            }
        )
    print(table.plain_table(list(rows[0]), [list(row.values()) for row in rows]))
    raised = Counter(kind for _, kinds in results for kind in kinds)
    print("raised:", ", ".join(f"{count} {kind}" for kind, count in raised.items()))
    context = table.provenance()
    table.append_csv(args.csv, ({**context, **row} for row in rows))


if __name__ == "__main__":
    main()
