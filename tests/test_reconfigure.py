"""reconfigure: the members say themselves who they are."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, check_group, run

import torch_gpumode.distributed as gd

HAS_OWN_HOOKS = hasattr(dist, "_reconfigure")  # torch 2.14


def exchange(me: Rank, names: list[int], key: str) -> list[str]:
    """Returns the handles of the ranks `names`, through a store of the test's own."""
    store = me.store("handles")
    store.set(f"{key}/{me.rank}", gd.get_reconfigure_handle())
    return [store.get(f"{key}/{name}").decode() for name in names]


def shrink_by_hand(me: Rank) -> None:
    """The survivors know each other; the group stays the same object."""
    world = dist.group.WORLD
    check_group(4)
    if me.rank == 1:
        return
    survivors = [0, 2, 3]
    gd.reconfigure(7, exchange(me, survivors, "a"))
    assert world is dist.group.WORLD
    assert world.rank() == survivors.index(me.rank)
    check_group(3)
    assert dist.get_process_group_ranks(world) == [0, 1, 2]
    tensor = torch.tensor([float(me.rank)])
    dist.broadcast(tensor, src=2)  # a global rank: the new one
    assert tensor.item() == 3
    # Another order, as a list; then none, as a set.
    gd.reconfigure(8, exchange(me, [3, 0, 2], "b"))
    assert world.rank() == [3, 0, 2].index(me.rank)
    check_group(3)
    gd.reconfigure(9, set(exchange(me, survivors, "c")), timeout=timedelta(seconds=10))
    assert world.rank() == survivors.index(me.rank)
    check_group(3)


def test_shrink_by_hand(tmp_path):
    run(shrink_by_hand, 4, tmp_path)


def other_groups(me: Rank) -> None:
    """Global ranks of other groups are translated when the default group shrinks."""
    pair, trio = dist.new_group([2, 3]), dist.new_group([0, 1, 3])
    if me.rank == 1:
        return
    gd.reconfigure(7, exchange(me, [0, 2, 3], "a"))
    if me.rank in (2, 3):
        assert dist.get_process_group_ranks(pair) == [1, 2]
        assert dist.get_rank(pair) == [2, 3].index(me.rank)
        check_group(2, pair)
        tensor = torch.tensor([float(me.rank)])
        dist.broadcast(tensor, src=1, group=pair)
        assert tensor.item() == 2
    if me.rank in (0, 3):
        assert dist.get_process_group_ranks(trio) == [0, 2]
        store = me.store("handles")
        store.set(f"trio/{me.rank}", gd.get_reconfigure_handle(trio))
        handles = [store.get(f"trio/{rank}").decode() for rank in (0, 3)]
        gd.reconfigure(5, handles, trio)
        assert dist.get_process_group_ranks(trio) == [0, 2]
        assert dist.get_global_rank(trio, 1) == 2
        check_group(2, trio)


def test_other_groups(tmp_path):
    run(other_groups, 4, tmp_path)


def shrink_a_split(me: Rank) -> None:
    """A group that split_group made."""
    world = dist.group.WORLD
    child = world.split_group([0, 1, 2], group_name="child") if me.rank < 3 else None
    if child is None or me.rank == 0:
        return
    assert (child.rank(), child.size()) == (me.rank, 3)
    backend = child._get_backend(torch.device("cpu"))
    store = me.store("handles")
    store.set(f"child/{me.rank}", backend.handle())
    handles = [store.get(f"child/{rank}").decode() for rank in (1, 2)]
    backend.rebuild(5, handles, timedelta(seconds=10))
    assert (child.rank(), child.size()) == (me.rank - 1, 2)
    tensor = torch.ones(1)
    child.allreduce([tensor]).wait()
    assert tensor.item() == 2


def test_shrink_a_split(tmp_path):
    run(shrink_a_split, 4, tmp_path)


def shrink_to_one(me: Rank) -> None:
    if me.rank == 1:
        return
    gd.reconfigure(7, [gd.get_reconfigure_handle()])
    check_group(1)


def test_shrink_to_one(tmp_path):
    run(shrink_to_one, 2, tmp_path)


def grow(me: Rank) -> None:
    """A group that is opened by reconfigure alone; ranks join that were not there at first."""
    store = me.store("handles")
    me.init(enable_reconfigure=True)
    with pytest.raises((ValueError, dist.DistBackendError)):
        dist.all_reduce(torch.ones(1))  # it has no members yet
    store.set(f"handle/{me.rank}", gd.get_reconfigure_handle())
    handles = [store.get(f"handle/{rank}").decode() for rank in range(me.size)]
    if me.rank != 2:
        gd.reconfigure(1, handles[:2])
        check_group(2)
    gd.reconfigure(2, handles)
    check_group(3)


@pytest.mark.skipif(not HAS_OWN_HOOKS, reason="enable_reconfigure came with torch 2.14")
def test_grow(tmp_path):
    run(grow, 3, tmp_path, init=False)


def torch_own_names(me: Rank) -> None:
    assert dist._supports_reconfigure()
    handle = dist._get_reconfigure_handle()
    assert handle == gd.get_reconfigure_handle()
    handles = exchange(me, [1, 0], "a")
    dist._reconfigure(uuid=11, handles=handles).wait()
    assert dist.get_rank() == 1 - me.rank
    dist._reconfigure(uuid=12, handles=set(handles)).wait()
    assert dist.get_rank() == me.rank
    check_group(2)
    with pytest.raises(ValueError, match="handles: "):
        dist._reconfigure(uuid=13, handles=["nobody"])


@pytest.mark.skipif(not HAS_OWN_HOOKS, reason="torch's own hooks came with 2.14")
def test_torch_own_names(tmp_path):
    run(torch_own_names, 2, tmp_path)


def repeated(me: Rank) -> None:
    """100 reconfigures leave nothing behind."""

    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    handles = exchange(me, [0, 1], "a")
    for i in range(100):
        gd.reconfigure(100 + i, handles)
        check_group(2)
        if i == 10:
            before = footprint()
    descriptors, threads = footprint()
    assert descriptors == before[0]
    # Two of ours start when they are needed first: one that drives ops, one that frees tensors.
    assert threads <= before[1] + 2


def test_repeated(tmp_path):
    run(repeated, 2, tmp_path)


def failed(me: Rank, then: str) -> None:
    """After a reconfigure that failed a rank can rebuild the group, or retry an op on it."""
    handles = exchange(me, [0, 1], "a")
    store = me.store("failed")
    if me.rank == 0:
        with pytest.raises(gd.CollectiveTimeout):
            gd.reconfigure(77, handles, timeout=timedelta(milliseconds=300))
        store.set("failed", "")
    else:
        store.wait(["failed"])
    if then == "rebuild":
        gd.rebuild()
    else:
        assert gd.all_reduce(torch.ones(1)).contributors == (0, 1)
    check_group(2)


@pytest.mark.parametrize("then", ["rebuild", "retry"])
def test_failed(then, tmp_path):
    run(failed, 2, tmp_path, then)
