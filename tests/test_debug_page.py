"""The page of torch.distributed.debug, asked for over HTTP while a rank hangs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks

pytest.importorskip("tabulate", reason="torch.distributed.debug needs it")
pytest.importorskip("requests", reason="torch.distributed.debug needs it")
debug = pytest.importorskip(
    "torch_gpumode.distributed.debug",
    reason="torch.distributed.debug takes pages from torch 2.14 on",
    exc_type=ImportError,
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(me: Rank, port: int) -> None:
    from torch.distributed.debug import start_debug_server, stop_debug_server

    os.environ |= {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(me._port),
    }
    socket.gethostname = lambda: "localhost"  # the name of a machine may not resolve
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dist.all_reduce(torch.randn(3, 5))
    start_debug_server(port=port, start_method="fork", handlers=debug.handlers())
    if me.rank == 1:
        me.say("late")
        while not (me.folder / "seen").exists():
            time.sleep(0.01)
    else:
        me.say("waits")
    dist.broadcast(torch.randn(7), 0)
    if me.rank == 0:
        stop_debug_server()


def fetch(url: str) -> str:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.1)


def test_page(tmp_path):
    port = free_port()
    with Ranks(serve, 2, tmp_path, port) as ranks:
        ranks.heard_from_all()
        deadline = time.monotonic() + 30
        while "started" not in (page := fetch(f"http://localhost:{port}/gpumode")):
            assert time.monotonic() < deadline, page
        (ranks.folder / "seen").touch()
        ranks.join()
    assert "PARTIAL DATA" not in page
    first, second = page.split("<h2>Rank ")[1:]
    for of_rank in (first, second):
        assert "gpumode:all_reduce" in of_rank
        assert "[[3, 5]]" in of_rank
    assert "gpumode:broadcast" in first
    assert "gpumode:broadcast" not in second
