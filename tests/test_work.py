"""Works and futures: values, callbacks, failures, what is kept alive, coalescing, timing."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _ranks import Rank, repeat, run
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.distributed_c10d import _coalescing_manager

from torch_gpumode.distributed import CollectiveAborted, CollectiveTimeout, abort


def future_value(me: Rank) -> None:
    tensor = torch.full((3,), float(me.rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    value = work.get_future().wait()
    assert isinstance(value, list)
    assert value[0].data_ptr() == tensor.data_ptr()
    assert value[0].tolist() == [3.0] * 3

    outputs = [torch.empty(2) for _ in range(me.size)]
    work = dist.all_gather(outputs, torch.full((2,), float(me.rank)), async_op=True)
    value = work.get_future().wait()
    assert [t.tolist() for t in value] == [[0.0] * 2, [1.0] * 2]

    work.wait()
    assert work.get_future().done(), "the future of a finished op is complete at once"
    assert work.is_completed()
    assert work.is_success()
    assert len(work.result()) == 2


def future_callbacks(me: Rank) -> None:
    """They run on a thread of their own and may call Python."""
    seen: list[tuple[str, float]] = []

    def then(future: torch.futures.Future) -> torch.Tensor:
        seen.append((threading.current_thread().name, future.value()[0].sum().item()))
        return future.value()[0] * 2

    if me.rank == 1:
        time.sleep(0.2)  # so that rank 0's callback is there before its op is done
    tensor = torch.ones(4)
    chained = dist.all_reduce(tensor, async_op=True).get_future().then(then)
    assert chained.wait().tolist() == [4.0] * 4
    assert seen[0][1] == 8.0


def callback_uses_the_group(me: Rank) -> None:
    """A callback may start ops, as DDP's hooks do."""

    def then(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return tensor

    tensor = torch.ones(4)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(then)
    assert future.wait().tolist() == [4.0] * 4


def callback_waits_for_a_future(me: Rank) -> None:
    """As PowerSGD's hook does, also when many are there at once."""

    def then(future: torch.futures.Future) -> torch.Tensor:
        again = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return again.then(lambda done: dist.all_reduce(done.value()[0], async_op=True)).wait()

    for _ in range(20):
        if me.rank == 1:
            time.sleep(0.002)  # so that no op is done at once
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(then)
        future.wait().wait()
    works = [dist.all_reduce(torch.full((4,), float(i)), async_op=True) for i in range(30)]
    waiting = [
        work.get_future().then(lambda _, i=i: works[i + 1].get_future().wait()[0].sum().item())
        for i, work in enumerate(works[:-1])
    ]
    assert [future.wait() for future in waiting] == [4.0 * 2 * (i + 1) for i in range(29)]


def dropped_works(me: Rank) -> None:
    """Neither a dropped work nor a dropped tensor stops an op."""
    for _ in range(200):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.all_reduce(torch.randn(1_000_000), async_op=True)
    gc.collect()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == me.size


def tensors_are_kept_alive(me: Rank) -> None:
    """An output whose last name is gone may not be handed out again while it is written."""
    if me.rank == 1:
        time.sleep(0.2)
    works = [dist.all_reduce(torch.full((100_000,), 1.0), async_op=True) for _ in range(5)]
    others = [torch.zeros(100_000) for _ in range(20)]
    for work in works:
        work.wait()
    assert all((other == 0).all() for other in others)


def registered_works(me: Rank) -> None:
    """Waiting forgets the work that functional collectives registered."""
    before = _get_work_registry_size()
    results = [
        torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)
        for _ in range(3)
    ]
    assert _get_work_registry_size() == before + 3
    for result in results:
        torch.ops._c10d_functional.wait_tensor(result)
    assert _get_work_registry_size() == before
    assert funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [2.0, 2.0]


def wait_with_timeout(me: Rank) -> None:
    """A wait that gives up leaves the op in flight."""
    if me.rank == 1:
        time.sleep(1.0)
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    if me.rank == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(milliseconds=100))
        assert 0.05 < time.monotonic() - began < 0.6
        assert not work.is_completed()
    work.wait()
    assert tensor.tolist() == [2.0, 2.0]


def failed_future(me: Rank) -> None:
    if me.rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        failures = []
        chained = future.then(lambda f: failures.append(f) or f.value())
        abort()
        me.store("done").set("aborted", "1")
        with pytest.raises(CollectiveAborted):
            future.wait()
        with pytest.raises(CollectiveAborted):
            work.wait()
        with pytest.raises(RuntimeError):  # torch.futures wraps what a callback raises
            chained.wait()
        assert failures == [future] or len(failures) == 1
        late = dist.all_reduce(torch.ones(2), async_op=True)  # does not raise here
        assert late.is_completed()
        assert not late.is_success()
        with pytest.raises(CollectiveAborted):
            late.get_future().wait()
    else:
        me.store("done").wait(["aborted"])
        with pytest.raises(CollectiveAborted):  # the first may find all that it needs in place
            repeat(lambda: dist.all_reduce(torch.ones(2)), 2)


def coalescing(me: Rank) -> None:
    world = dist.group.WORLD
    tensors = [torch.full((n,), float(me.rank + 1)) for n in (3, 5)]
    gathered = torch.empty(me.size)
    world._start_coalescing(torch.device("cpu"))
    for tensor in tensors:
        part = world.allreduce([tensor])
        assert not part.is_completed()
    world._allgather_base(gathered, torch.tensor([float(me.rank)]))
    work = world._end_coalescing(torch.device("cpu"))
    work.wait()
    assert part.is_completed()
    assert [t.tolist() for t in tensors] == [[3.0] * 3, [3.0] * 5]
    assert gathered.tolist() == [0.0, 1.0]

    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.tolist() for t in tensors] == [[6.0] * 3, [6.0] * 5]

    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert tensors[0].tolist() == [12.0] * 3

    # An exception has left a block open: its ops are dropped by the next one.
    world._start_coalescing(torch.device("cpu"))
    dropped = world.allreduce([tensors[0]])
    world._start_coalescing(torch.device("cpu"))
    assert world._end_coalescing(torch.device("cpu")) is None
    with pytest.raises(CollectiveAborted, match="never ran"):
        dropped.wait()
    assert tensors[0].tolist() == [12.0] * 3
    with pytest.raises(RuntimeError, match="without startCoalescing"):
        world._end_coalescing(torch.device("cpu"))


def coalescing_is_per_thread(me: Rank) -> None:
    """An asynchronous checkpoint's thread is not drawn into another thread's batch."""
    group = dist.new_group(list(range(me.size)))
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([torch.ones(1)])
    tensor = torch.ones(1)
    thread = threading.Thread(target=lambda: group.allreduce([tensor]).wait())
    thread.start()
    thread.join(10)
    assert tensor.item() == me.size
    group._end_coalescing(torch.device("cpu")).wait()


def sequence_numbers(me: Rank) -> None:
    """Collectives only: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares them between ranks."""
    world = dist.group.WORLD
    if hasattr(world, "_set_sequence_number_for_group"):  # until torch 2.13
        world._set_sequence_number_for_group()
    before = world._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    peer = 1 - me.rank
    ops = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.ones(1), peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert world._get_sequence_number_for_group() == before + 2


def timing(me: Rank) -> None:
    dist.group.WORLD._enable_collectives_timing()
    if me.rank == 1:
        time.sleep(0.1)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    if me.rank == 0:
        assert 50 < work._get_duration() < 5000  # ms


def profiler_labels(me: Rank) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        dist.barrier()
    names = [event.name for event in profile.events()]
    assert names.count("gpumode:all_reduce") == 2
    assert "gpumode:barrier" in names


def completion_hook(me: Rank) -> None:
    world = dist.group.WORLD
    infos = []
    world._register_on_completion_hook(infos.append)
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    world._wait_for_pending_works()
    assert [info.seq for info in infos] == sorted(info.seq for info in infos)
    assert len(infos) == 5


def abort_hook(me: Rank) -> None:
    """Called before an abort on purpose, and after a failure; once per failure."""
    world = dist.group.WORLD
    if not hasattr(world, "register_abort_hook"):  # torch before 2.14
        return
    calls = []
    world.register_abort_hook(1, lambda: calls.append("kept"))
    world.register_abort_hook(2, lambda: calls.append("removed"))
    world.unregister_abort_hook(2)
    dist.all_reduce(torch.ones(1))
    assert calls == []
    if me.rank == 0:
        abort()
    with pytest.raises(CollectiveAborted):
        repeat(lambda: dist.all_reduce(torch.ones(1)), 3)
    world._wait_for_pending_works()
    assert calls == ["kept"]


def two_threads(me: Rank) -> None:
    """Sync and async calls on two groups from two threads."""
    groups = [dist.new_group(list(range(me.size))) for _ in range(2)]
    failures = []

    def work(group: dist.ProcessGroup) -> None:
        for step in range(100):
            tensor = torch.full((1000,), float(step))
            if step % 2:
                dist.all_reduce(tensor, group=group)
            else:
                dist.all_reduce(tensor, group=group, async_op=True).wait()
            if not (tensor == step * me.size).all():
                failures.append(step)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


@pytest.mark.parametrize(
    "function",
    [
        abort_hook,
        callback_uses_the_group,
        callback_waits_for_a_future,
        coalescing,
        coalescing_is_per_thread,
        completion_hook,
        dropped_works,
        failed_future,
        future_callbacks,
        future_value,
        profiler_labels,
        registered_works,
        sequence_numbers,
        tensors_are_kept_alive,
        timing,
        two_threads,
        wait_with_timeout,
    ],
)
def test_work(function, tmp_path):
    run(function, 2, tmp_path)


def ephemeral_timeout(me: Rank) -> None:
    world = dist.group.WORLD
    if not hasattr(world, "_add_ephemeral_timeout"):
        return
    world._add_ephemeral_timeout(timedelta(seconds=20))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.timeout == timedelta(seconds=50)
    work.wait()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.timeout == timedelta(seconds=30)


def set_timeout(me: Rank) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))
    dist.all_reduce(torch.ones(1))
    if me.rank == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(1))
        assert 0.9 < time.monotonic() - began < 2
        assert caught.value.ranks == [1]
        me.store("done").set("raised", "1")
    else:
        me.store("done").wait(["raised"])


@pytest.mark.parametrize("function", [ephemeral_timeout, set_timeout])
def test_timeouts(function, tmp_path):
    run(function, 2, tmp_path)
