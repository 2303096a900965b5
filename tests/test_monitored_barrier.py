"""monitored_barrier: who did not come is named on every rank, in Gloo's words and by `ranks`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, run

import torch_gpumode.distributed as gd


def _with_torch(group: dist.ProcessGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    dist.monitored_barrier(group, timeout, wait_all_ranks)


def _with_group(group: dist.ProcessGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    group.monitored_barrier(timeout, wait_all_ranks)


BARRIERS = {
    "ours": gd.monitored_barrier,
    "torch": pytest.param(
        _with_torch,
        marks=pytest.mark.skipif(
            torch.__version__ < "2.14", reason="torch refuses groups of another name than gloo"
        ),
    ),
    "group": _with_group,
}


def stay(me: Rank) -> None:
    """Keeps a rank, which would else be lost, until rank 0 has seen what it is to see."""
    store = me.store("stay")
    if me.rank == 0:
        store.set("seen", "1")
    store.wait(["seen"])


def names_the_missing(me: Rank, barrier: Callable, wait_all_ranks: bool) -> tuple[str, list[int]]:
    """Ranks 1 and 3 do not come. Returns what was raised."""
    group = dist.new_group()
    barrier(group, timedelta(seconds=20), wait_all_ranks)
    text, ranks = "", []
    if me.rank not in (1, 3):
        with pytest.raises(gd.CollectiveTimeout) as caught:
            barrier(group, timedelta(milliseconds=300), wait_all_ranks)
        with pytest.raises(gd.CollectiveTimeout):  # the group stays closed
            dist.all_reduce(torch.ones(1), group=group)
        text, ranks = str(caught.value), caught.value.ranks
    stay(me)
    return text, ranks


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("barrier", BARRIERS.values(), ids=BARRIERS)
def test_names_the_missing(barrier, wait_all_ranks, tmp_path):
    results = run(names_the_missing, 4, tmp_path, barrier, wait_all_ranks)
    missing = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
    for rank in (0, 2):
        text, ranks = results[rank]
        assert f"{missing} failed to pass monitoredBarrier in 300 ms" in text
        assert ranks == [1, 3]
    assert results[0][0].startswith(missing)
    assert "Rank 0 timed out in monitoredBarrier" in results[0][0]
    assert results[2][0].startswith(
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {missing}"
    )


def waits_for_all(me: Rank) -> None:
    """Nobody passes before the last has come."""
    store = me.store("progress")
    for turn in range(20):
        store.add(f"came {turn}", 1)
        gd.monitored_barrier()
        assert store.add(f"came {turn}", 0) == me.size


def is_in_order_with_other_ops(me: Rank) -> None:
    tensor = torch.full((100_000,), float(me.rank))
    work = dist.all_reduce(tensor, async_op=True)
    gd.monitored_barrier(timeout=timedelta(seconds=20))
    assert work.is_completed()
    assert tensor.unique().tolist() == [1.0]


def waits_behind_an_op(me: Rank) -> None:
    """The missing ranks are those that the op before it waits for."""
    if me.rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(gd.CollectiveTimeout, match="Rank 1 failed to pass") as caught:
            gd.monitored_barrier(timeout=timedelta(milliseconds=200))
        assert caught.value.ranks == [1]
    stay(me)


def has_no_time(me: Rank) -> None:
    if me.rank == 0:
        with pytest.raises(gd.CollectiveTimeout, match="Rank 0 timed out in monitoredBarrier"):
            dist.group.WORLD.monitored_barrier(timedelta(0))
        with pytest.raises(ValueError, match="timeout: expected a positive one"):
            gd.monitored_barrier(timeout=timedelta(0))
    stay(me)


def another_collective(me: Rank) -> None:
    calls = [gd.monitored_barrier, lambda: dist.all_reduce(torch.ones(1))]
    with pytest.raises(gd.CollectiveMismatch, match=r"rank 0 called barrier\(\), .* all_reduce"):
        calls[me.rank]()


def group_of_others(me: Rank) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    for group in groups:
        gd.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=True)


def group_has_failed(me: Rank) -> None:
    """The text is then of what failed."""
    gd.monitored_barrier()
    gd.abort(dist.group.WORLD)
    with pytest.raises(gd.CollectiveAborted, match=r"^(?!.*monitoredBarrier)"):
        gd.monitored_barrier()


def late(me: Rank) -> None:
    """Who comes when the others have given up does not pass either."""
    store = me.store("late")
    if me.rank == 0:
        with pytest.raises(gd.CollectiveTimeout, match="Rank 1 failed to pass monitoredBarrier"):
            gd.monitored_barrier(timeout=timedelta(milliseconds=200))
        store.set("gave up", "1")
    else:
        store.wait(["gave up"])
        with pytest.raises(gd.CollectiveTimeout):
            gd.monitored_barrier()


@pytest.mark.parametrize(
    "check",
    [
        waits_for_all,
        is_in_order_with_other_ops,
        waits_behind_an_op,
        has_no_time,
        another_collective,
        group_of_others,
        group_has_failed,
        late,
    ],
)
def test_on_two_ranks(check, tmp_path):
    run(check, 2, tmp_path)
