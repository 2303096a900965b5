"""Runs a function on several ranks, each a real process, and brings back what came of it.

    def add(me: Rank) -> list[float]:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert run(add, 2, tmp_path) == [[2.0] * 3] * 2

The processes are forked from this one, which has torch loaded already, so a test costs
milliseconds. This process itself never opens a group: threads do not survive a fork.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else each rank that wraps a model or makes a mesh imports it
import torch.distributed as dist

_context = multiprocessing.get_context("fork")
_run_numbers = itertools.count()


@dataclass
class Rank:
    """What a rank knows of itself. The default group is open, unless `init=False`."""

    rank: int
    size: int
    folder: Path
    store_pid: int
    _port: int
    _connection: Connection

    def store(self, name: str = "store") -> dist.Store:
        """Returns a store that all ranks and the test share, and that outlives any rank."""
        return dist.PrefixStore(name, self._client)

    @functools.cached_property
    def _client(self) -> dist.Store:
        return _connect(self._port)

    def init(self, timeout_s: float = 30.0, **kwargs: Any) -> None:
        if "store" not in kwargs:
            kwargs["store"] = self.store()
        dist.init_process_group(
            "gpumode",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
            **kwargs,
        )

    def say(self, value: Any) -> None:
        """Tells the test something, in the middle of the run."""
        self._connection.send(("said", value))


class Ranks:
    """Ranks that are running; a context manager, which leaves none behind.

    Args:
        function: called on each rank with its `Rank` and `args`; its value must pickle.
        timeout_s: of the default group.
        limit_s: how long all of it may take, joining included.
        init: whether to open the default group first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        folder: Path,
        *args: Any,
        timeout_s: float = 30.0,
        limit_s: float = 60.0,
        init: bool = True,
    ) -> None:
        self.size = size
        self.folder = folder / f"run{next(_run_numbers)}"
        self.folder.mkdir(parents=True)
        self._deadline = time.monotonic() + limit_s
        self._said: list[list[Any]] = [[] for _ in range(size)]
        self._done: list[tuple[str, Any] | None] = [None] * size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        mine, theirs = _context.Pipe()
        self._server = _context.Process(target=_serve_store, args=(theirs, limit_s), daemon=True)
        self._server.start()
        self._port = mine.recv()
        for rank in range(size):
            mine, theirs = _context.Pipe()
            me = Rank(rank, size, self.folder, self._server.pid, self._port, theirs)
            process = _context.Process(
                target=_main, args=(me, function, args, init, timeout_s, limit_s), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in [*self._processes, self._server]:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()

    def store(self, name: str) -> dist.Store:
        return dist.PrefixStore(name, _connect(self._port))

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def signal(self, rank: int, signum: signal.Signals) -> float:
        """Sends a signal, and returns time.monotonic() just before it."""
        now = time.monotonic()
        os.kill(self.pid(rank), signum)
        return now

    def heard(self, rank: int) -> Any:
        """Returns the next thing that the rank said, waiting for it."""
        while not self._said[rank]:
            assert self._done[rank] is None, f"rank {rank} ended: {self._done[rank]}"
            self._read(rank)
        return self._said[rank].pop(0)

    def heard_from_all(self) -> list[Any]:
        return [self.heard(rank) for rank in range(self.size)]

    def join(self, *, lost: tuple[int, ...] = ()) -> list[Any]:
        """Returns what the function returned on each rank; None for the `lost`, not waited for.

        Raises:
            AssertionError: a rank raised, died, or is not done within the limit; or a lost one
                raised, and so was lost in another way than the test meant.
        """
        for rank in range(self.size):
            while rank not in lost and self._done[rank] is None:
                self._read(rank)
        for rank in lost:
            while self._done[rank] is None and self._connections[rank].poll():
                self._read(rank)
        problems, values = [], []
        for rank, done in enumerate(self._done):
            kind, value = done or ("hung", None)
            if kind == "raised" or (kind != "returned" and rank not in lost):
                problems.append(f"--- rank {rank}\n{value}")
            values.append(None if rank in lost else value)
        assert not problems, "\n".join(problems)
        return values

    def _read(self, rank: int) -> None:
        if not self._connections[rank].poll(max(0.0, self._deadline - time.monotonic())):
            self._done[rank] = ("hung", f"hangs at\n{self._stack(rank)}")
            return
        try:
            kind, value = self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join(5)
            self._done[rank] = ("died", f"died, exit code {self._processes[rank].exitcode}")
            return
        if kind == "said":
            self._said[rank].append(value)
        else:
            self._done[rank] = (kind, value)

    def _stack(self, rank: int) -> str:
        path = self.folder / f"stack{rank}"
        return path.read_text() if path.exists() else "(no stack)"


def run(function: Callable[..., Any], size: int, folder: Path, *args: Any, **kwargs: Any) -> list:
    """Returns what `function` returned on each rank; see Ranks."""
    with Ranks(function, size, folder, *args, **kwargs) as ranks:
        return ranks.join()


def repeat(call: Callable[[], object], times: int = 1_000_000) -> None:
    """Calls again and again, for a failure that may show in a later call only."""
    for _ in range(times):
        call()


def check_group(size: int, group: dist.ProcessGroup | None = None) -> None:
    """Asserts that a group has this size and works."""
    pg = group or dist.group.WORLD
    assert (pg.size(), dist.get_world_size(pg)) == (size, size)
    assert pg.rank() == dist.get_rank(pg)
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=pg)
    assert tensor.tolist() == [float(size)] * 5
    gathered = [torch.empty(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank(pg))]), group=pg)
    assert [t.item() for t in gathered] == list(range(size))


def _connect(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))


def _serve_store(connection: Connection, limit_s: float) -> None:
    """A process of its own, so that no rank's death takes the store away."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(server.port)
    time.sleep(limit_s)


def _main(
    me: Rank,
    function: Callable[..., Any],
    args: tuple,
    init: bool,
    timeout_s: float,
    limit_s: float,
) -> None:
    torch.set_num_threads(1)
    stack = open(me.folder / f"stack{me.rank}", "w")  # noqa: SIM115  (open as long as the process)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 1.0), file=stack)
    try:
        if init:
            me.init(timeout_s)
        value = function(me, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        me._connection.send(("returned", value))
    except BaseException:
        me._connection.send(("raised", traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
