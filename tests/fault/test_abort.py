"""abort: from any thread, in the middle of anything, again and again (cases F1, F2, F4, F6, F7)."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, repeat, run
from torch.nn.parallel import DistributedDataParallel

import torch_gpumode.distributed as gd


def abort_a_waiting_one(me: Rank) -> None:
    """Case F7: rank 0 waits in an all-reduce that nobody else joins."""
    if me.rank == 1:
        me.store("done").wait(["aborted"])
        return
    threading.Timer(0.2, gd.abort).start()
    began = time.monotonic()
    with pytest.raises(gd.CollectiveAborted):
        dist.all_reduce(torch.ones(4))
    assert 0.1 < time.monotonic() - began < 1.2
    me.store("done").set("aborted", "1")


def one_abort_ends_all(me: Rank) -> None:
    """The others are released at once, not by their timeout of 10 minutes (case F9)."""
    dist.barrier()
    if me.rank == 1:
        time.sleep(0.2)
        gd.abort()
        me.store("time").set("abort", str(time.monotonic()))
        return
    with pytest.raises(gd.CollectiveAborted):
        dist.all_reduce(torch.ones(4))
    raised = time.monotonic()
    assert raised - float(me.store("time").get("abort")) < 1


def come_too_late(me: Rank) -> None:
    """A barrier that the others have given up is none."""
    if me.rank == 2:
        me.store("done").wait(["given up"])
    with pytest.raises(gd.CollectiveTimeout):
        dist.barrier()
    me.store("done").set("given up", "1")


def test_come_too_late(tmp_path):
    run(come_too_late, 3, tmp_path, timeout_s=0.5)


def many_groups_in_any_order(me: Rank) -> None:
    """Case F1."""
    groups = [dist.new_group(list(range(me.size))) for _ in range(5)]
    works = [dist.all_reduce(torch.ones(100), group=g, async_op=True) for g in groups]
    for work in works:
        work.wait()
    dist.barrier()
    if me.rank == 0:
        works = [dist.all_reduce(torch.ones(100), group=g, async_op=True) for g in groups]
        time.sleep(0.05)
        for group in (groups[3], groups[0], groups[4], groups[1], groups[2]):
            gd.abort(group)
        for work in works:
            with pytest.raises(gd.CollectiveAborted):
                work.wait()
    dist.barrier()


def from_another_thread(me: Rank) -> None:
    """Case F2: while the main thread starts ops."""
    for round_number in range(200):
        group = dist.new_group(list(range(me.size)))
        thread = threading.Thread(target=lambda g=group: (time.sleep(0.0005), gd.abort(g)))
        thread.start()
        with pytest.raises(dist.DistBackendError):
            repeat(functools.partial(dist.all_reduce, torch.ones(10), group=group))
        thread.join(5)
        assert not thread.is_alive(), f"abort hangs in round {round_number}"
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "function",
    [abort_a_waiting_one, one_abort_ends_all, many_groups_in_any_order, from_another_thread],
)
def test_abort(function, tmp_path):
    run(function, 2, tmp_path, timeout_s=600, limit_s=60)


def _footprint() -> tuple[int, int, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    return int(status.split("VmRSS:")[1].split()[0]), len(os.listdir("/proc/self/fd")), threads


def abort_and_init_again(me: Rank) -> None:
    """Case F4, on the same store and under the same group name."""
    store = me.store()
    for i in range(110):
        if i == 10:
            before = _footprint()
        me.init(store=store)
        tensor = torch.full((1000,), float(i))
        dist.all_reduce(tensor)
        assert (tensor == i * me.size).all()
        work = dist.all_reduce(tensor, async_op=True) if me.rank == 0 else None
        gd.abort()
        if work is not None:
            with pytest.raises(gd.CollectiveAborted):
                work.wait()
        dist.destroy_process_group()
    resident_kib, num_fds, num_threads = (a - b for a, b in zip(_footprint(), before, strict=True))
    assert num_fds <= 0
    assert num_threads <= 0
    assert resident_kib < 8 * 1024, f"{resident_kib} KiB more after 100 rounds"


def test_abort_and_init_again(tmp_path):
    run(abort_and_init_again, 2, tmp_path, init=False)


def abort_in_backward(me: Rank) -> None:
    """Case F6: an exception from backward, and the model can be used again."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300) for _ in range(10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.4)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(me.rank))

    def step() -> torch.Tensor:
        model.zero_grad()
        model(inputs).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = step()
    step()
    handles = [None] * me.size
    dist.all_gather_object(handles, gd.get_reconfigure_handle())
    if me.rank == 0:
        # In the middle: when the gradient of the sixth layer is there.
        hook = layers[5].weight.register_hook(lambda _: gd.abort())
    with pytest.raises(gd.CollectiveAborted):
        repeat(step, 2)
    if me.rank == 0:
        hook.remove()
    gd.reconfigure(3, handles, timeout=timedelta(seconds=10))
    assert torch.equal(step(), expected)
    assert torch.equal(step(), expected)


def test_abort_in_backward(tmp_path):
    run(abort_in_backward, 2, tmp_path)
