"""The flight record: what a group did last, in memory and in the file that a failure leaves."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks, run

import torch_gpumode.distributed as gd
from torch_gpumode.distributed import _backend


def entries(me: Rank) -> None:
    x = torch.randn(3, 5)
    dist.all_reduce(x)
    outputs = [torch.empty(2) for _ in range(me.size)]
    dist.all_gather(outputs, torch.randn(2))
    if me.rank == 0:
        dist.send(torch.randn(7), 1)
    elif me.rank == 1:
        dist.recv(torch.empty(7), 0)
    dist.barrier()
    record = gd.flight_record()
    names = [e["profiling_name"] for e in record["entries"]]
    transfer = {0: ["gpumode:send"], 1: ["gpumode:recv"]}.get(me.rank, [])
    assert names == ["gpumode:all_reduce", "gpumode:all_gather", *transfer, "gpumode:barrier"]
    first, gather, *_, barrier = record["entries"]
    assert first["input_sizes"] == first["output_sizes"] == [[3, 5]]
    assert first["input_dtypes"] == ["Float"]
    assert gather["output_sizes"] == [[2]] * me.size
    assert [e["collective_seq_id"] for e in (first, gather, barrier)] == [1, 2, 3]
    assert barrier["p2p_seq_id"] == len(transfer)
    for entry in record["entries"]:
        assert entry["state"] == "completed"
        assert (entry["error"], entry["attempt"]) == (None, 0)
        assert abs(entry["time_created_ns"] / 1e9 - time.time()) < 60
        assert 0 <= entry["duration_ms"] < 60_000
        assert entry["timeout_ms"] == 30_000
    (config,) = record["pg_config"].values()
    assert config["ranks"] == str(list(range(me.size)))


def epochs(me: Rank) -> None:
    dist.all_reduce(torch.randn(3))
    gd.rebuild()
    dist.all_reduce(torch.randn(3))
    before, after = gd.flight_record()["entries"]
    assert before["epoch"] != after["epoch"]
    assert before["collective_seq_id"] == after["collective_seq_id"] == 1


def sub_groups(me: Rank) -> None:
    even = dist.new_group([0, 2], group_desc="even")
    if me.rank != 1:
        dist.all_reduce(torch.randn(3), group=even)
    dist.broadcast(torch.randn(3), 1)
    everything = gd.flight_record()["entries"]
    assert [e["profiling_name"] for e in everything][-1] == "gpumode:broadcast"
    if me.rank == 1:
        return
    (only,) = gd.flight_record(even)["entries"]
    assert only["profiling_name"] == "gpumode:all_reduce"
    assert only["process_group"][1] == "even"
    (config,) = gd.flight_record(even)["pg_config"].values()
    assert (config["desc"], config["ranks"]) == ("even", "[0, 2]")
    assert everything[-1]["process_group"][1] == "default_pg"


def coalesced(me: Rank) -> None:
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    ops = [
        dist.P2POp(dist.isend, torch.randn(4), right),
        dist.P2POp(dist.irecv, torch.empty(4), left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    record = gd.flight_record()["entries"]
    names = [e["profiling_name"] for e in record]
    assert names == ["gpumode:send", "gpumode:recv", "gpumode:coalesced"]
    assert [e["p2p_seq_id"] for e in record] == [1, 1, 1]


def only_the_last(me: Rank) -> None:
    for i in range(1, 1101):
        dist.all_reduce(torch.randn(i % 7))
    record = gd.flight_record()["entries"]
    assert [e["collective_seq_id"] for e in record] == list(range(101, 1101))
    assert [e["input_sizes"] for e in record[-3:]] == [[[i % 7]] for i in (1098, 1099, 1100)]


@pytest.mark.parametrize(
    "function", [entries, epochs, sub_groups, coalesced, only_the_last], ids=lambda f: f.__name__
)
def test_record(function, tmp_path):
    run(function, 3, tmp_path)


def again_with_fewer(me: Rank) -> None:
    """A group that is over, but still held by somebody, does not stand in for its successor."""
    kept = dist.group.WORLD
    dist.all_reduce(torch.randn(3))
    dist.destroy_process_group()
    if me.rank < 2:
        me.size = 2
        me.init(store=me.store("again"))
        dist.all_reduce(torch.randn(4))
        (config,) = gd.flight_record()["pg_config"].values()
        assert config["ranks"] == "[0, 1]"
    assert kept.size() == 3


def test_successor(tmp_path):
    run(again_with_fewer, 3, tmp_path)


def fork_while_read(me: Rank) -> None:
    """A child forked at any moment may run what is registered for the exit."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            gd.flight_record()

    for _ in range(300):
        dist.all_reduce(torch.randn(3))
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        child = os.fork()
        if child == 0:
            _backend.C.shutdown_all()
            os._exit(7)
        deadline = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
    stop.set()
    reader.join()


def test_fork(tmp_path):
    run(fork_while_read, 1, tmp_path)


def number_remembered(me: Rank) -> int:
    for _ in range(5):
        dist.barrier()
    return len(gd.flight_record()["entries"])


@pytest.mark.parametrize("wanted", [0, 3])
def test_size(wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_GPUMODE_FLIGHT_RECORD", str(wanted))
    assert run(number_remembered, 2, tmp_path) == [wanted] * 2


def late(me: Rank) -> list[tuple[int, str, int, float]]:
    def call(name: str, late_rank: int, function: Callable[..., dist.Work]) -> None:
        if me.rank == late_rank:
            me.store().wait([f"{name} {rank}" for rank in range(me.size) if rank != me.rank])
            time.sleep(0.2)
            function().wait()
        else:
            work = function()
            me.store().set(f"{name} {me.rank}", "")
            work.wait()

    for i in range(3):
        call(f"reduce {i}", 2, lambda: dist.all_reduce(torch.randn(10), async_op=True))
    call("barrier", 1, lambda: dist.barrier(async_op=True))
    return [(s.rank, s.op, s.count, s.waited.total_seconds()) for s in gd.stragglers()]


def both_late(me: Rank) -> list[float]:
    """The first one waits as long as if only one of them were late."""
    if me.rank > 0:
        me.store().wait(["there"])
        time.sleep(0.2)
        dist.all_reduce(torch.randn(10))
    else:
        work = dist.all_reduce(torch.randn(10), async_op=True)
        me.store().set("there", "")
        work.wait()
    (straggler,) = gd.stragglers()
    assert straggler.rank > 0
    return straggler.waited.total_seconds()


def test_two_stragglers(tmp_path):
    waited = run(both_late, 3, tmp_path)
    assert waited[0] > 0.1
    assert len(set(waited)) == 1


def test_stragglers(tmp_path):
    for first, second in run(late, 3, tmp_path):
        assert first[:3] == (2, "all_reduce", 3)
        assert second[:3] == (1, "barrier", 1)
        assert first[3] > 0.4
        assert second[3] > 0.1


def hang(me: Rank) -> None:
    dist.all_reduce(torch.randn(6))
    dist.all_gather_into_tensor(torch.empty(2 * me.size), torch.randn(2))
    dist.barrier()
    if me.rank == 1:
        me.say("late")
        time.sleep(60)
    queued = [dist.all_reduce(torch.randn(9), async_op=True) for _ in range(2)]
    with pytest.raises(gd.CollectiveTimeout):
        queued[0].wait()


def wait_for_file(path: Path) -> bytes:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
    return path.read_bytes()


def test_dump_on_timeout(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "traces" / "fr_"))
    with Ranks(hang, 3, tmp_path, timeout_s=1.0) as ranks:
        ranks.heard(1)
        ranks.join(lost=(1,))
    for rank in (0, 2):
        record = pickle.loads(wait_for_file(tmp_path / "traces" / f"fr_gpumode_rank_{rank}"))
        *before, stuck, _ = record["entries"]
        assert [e["profiling_name"] for e in before] == [
            "nccl:all_reduce",
            "nccl:_all_gather_base",
            "nccl:all_reduce_barrier",
        ]
        assert [e["state"] for e in record["entries"]] == [
            *["completed"] * 3,
            "started",
            "scheduled",
        ]
        assert "Timeout" in stuck["error"]
        assert "rank 1" in stuck["error"]
        assert stuck["retired"]


def aborted(me: Rank) -> None:
    work = dist.all_reduce(torch.randn(9), async_op=True) if me.rank == 0 else None
    me.say("started")
    if me.rank == 1:
        gd.abort()
    elif work is not None:
        with pytest.raises(gd.CollectiveAborted):
            work.wait()
    else:
        with pytest.raises(gd.CollectiveAborted):
            dist.all_reduce(torch.randn(9))


def test_dump_on_abort(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/")
    run(aborted, 3, tmp_path)
    record = pickle.loads(wait_for_file(tmp_path / "gpumode_rank_0"))
    (entry,) = record["entries"]
    assert "rank 1 aborted the group" in entry["error"]


def mismatched(me: Rank) -> None:
    dist.all_reduce(torch.randn(6))
    half = dist.new_group([0, 1])
    if me.rank < 2:
        dist.all_reduce(torch.randn(6), group=half)
    with dist._coalescing_manager():
        dist.all_reduce(torch.randn(6))
        dist.all_reduce(torch.randn(5))
    lists = [torch.empty(2) for _ in range(me.size)]
    dist.all_gather(lists, torch.randn(2))
    dist.reduce_scatter(torch.empty(2), lists)
    dist.reduce_scatter_tensor(torch.empty(2), torch.randn(2 * me.size))
    dist.all_to_all_single(torch.empty(me.size), torch.randn(me.size))
    dist.gather(torch.randn(2), lists if me.rank == 0 else None)
    dist.scatter(torch.empty(2), lists if me.rank == 0 else None)
    dist.all_to_all(
        [torch.empty(rank + me.rank) for rank in range(me.size)],
        [torch.randn(rank + me.rank) for rank in range(me.size)],
    )
    dist.all_reduce(torch.sparse_coo_tensor([[me.rank]], [1.5], (5,)))
    dist.barrier()
    with pytest.raises(gd.CollectiveMismatch):
        dist.all_reduce(torch.randn(8 if me.rank == 2 else 9))


def test_torchs_analyser_reads_it(tmp_path, monkeypatch):
    """It finds the op that does not match, and nothing wrong with those before."""
    traces = tmp_path / "traces"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{traces}/")
    run(mismatched, 3, tmp_path)
    for rank in range(3):
        wait_for_file(traces / f"gpumode_rank_{rank}")
    analyser = "torch.distributed.flight_recorder.fr_trace"
    done = subprocess.run(
        [sys.executable, "-m", analyser, "-p", "gpumode_rank_", str(traces)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    (found,) = [line for line in text.splitlines() if line.startswith("error msg:")]
    assert "Culprit rank 2" in found
    assert "'[[9]]' does not match found input sizes: '[[8]]'" in found
    assert "No errors found" not in text  # what it says where it cannot match entries
