"""Ranks of this host: torchrun's if it started us, else as many forked processes as asked for."""

import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_INIT_TIMEOUT = datetime.timedelta(minutes=5)


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on `num_ranks` new processes in a Gloo world; their results, by rank.

    Under torchrun this process is one of its ranks already: the list has its own result only, and
    num_ranks must be 0 or the world's size.

    Raises:
        ValueError: num_ranks is not what torchrun started.
        RuntimeError: a rank failed; with its traceback. The other ranks are ended.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if num_ranks not in (0, int(os.environ["WORLD_SIZE"])):
            raise ValueError(f"num_ranks is {num_ranks}, but torchrun started another number")
        dist.init_process_group("gloo", timeout=_INIT_TIMEOUT)
        return [_in_world(function, args)]

    context = multiprocessing.get_context("fork")  # torch is loaded once, not once per rank
    with tempfile.TemporaryDirectory() as folder:
        store_path = os.path.join(folder, "store")
        ranks, pipes = [], []
        for rank in range(num_ranks):
            pipe, end = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(end, function, args, rank, num_ranks, store_path)
            )
            process.start()
            end.close()
            ranks.append(process)
            pipes.append(pipe)
        try:
            return _collect(pipes)
        finally:
            for process in ranks:
                process.terminate()  # after a result or a failure nobody has anything left to do
            for process in ranks:
                process.join()


def new_group(backend: str) -> dist.ProcessGroup:
    """A group of all ranks."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _collect(pipes: list[multiprocessing.connection.Connection]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        for pipe in multiprocessing.connection.wait(list(waiting)):
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _rank_main(
    end: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    store_path: str,
) -> None:
    try:
        store = dist.FileStore(store_path, num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=_INIT_TIMEOUT
        )
        end.send((True, _in_world(function, args)))
    except BaseException:
        end.send((False, traceback.format_exc()))


def _in_world(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)  # ranks share the cores
    result = function(*args)
    # Not after a failure: the others would fail for that, and might be heard first.
    dist.destroy_process_group()
    return result
