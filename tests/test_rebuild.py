"""rebuild: the survivors agree who is left, and go on; DDP on top."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks, check_group, repeat, run
from torch.nn.parallel import DistributedDataParallel

import torch_gpumode.distributed as gd


def rebuild_after_kill(me: Rank, rounds: int) -> list[int]:
    """One rank after the other is killed; who is left goes on each time."""
    sizes = []
    for _ in range(rounds):
        me.say("ready")
        with pytest.raises(gd.PeerLost):
            repeat(lambda: dist.all_reduce(torch.ones(100_000)))
        gd.rebuild(timeout=timedelta(seconds=20))
        size = dist.get_world_size()
        check_group(size)
        sizes.append(size)
    return sizes


def test_rebuild_after_kill(tmp_path):
    with Ranks(rebuild_after_kill, 4, tmp_path, 2) as ranks:
        ranks.heard_from_all()
        ranks.signal(2, signal.SIGKILL)
        for rank in (0, 1, 3):
            ranks.heard(rank)
        ranks.signal(0, signal.SIGKILL)
        assert ranks.join(lost=(0, 2))[1] == [3, 2]


def die_during_rebuild(me: Rank) -> int:
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(1000)))
    if me.rank == 3:  # it is among those who were decided on, and dies before it joins them
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        attempt = backend.begin_rebuild(timedelta(seconds=20), None)
        while not attempt.agreed():
            time.sleep(attempt.step())
        signal.raise_signal(signal.SIGKILL)
    gd.rebuild(timeout=timedelta(seconds=20))
    check_group(3)
    return dist.get_rank()


def test_second_death_on_the_way(tmp_path):
    """Case F10: the survivors agree again."""
    with Ranks(die_during_rebuild, 5, tmp_path) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        assert ranks.join(lost=(1, 3)) == [0, None, 1, None, 2]


def rebuild_all(me: Rank) -> tuple[float, float, list[int], float]:
    """The world and then a subgroup that was idle when a rank of both died."""
    subgroup = dist.new_group([1, 2, 3], timeout=timedelta(seconds=60))
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(1000)))
    began = time.monotonic()
    gd.rebuild()
    world_s = time.monotonic() - began
    if me.rank == 0:
        return world_s, 0.0, [], 0.0
    began = time.monotonic()
    gd.rebuild(subgroup)
    subgroup_s = time.monotonic() - began
    members = dist.get_process_group_ranks(subgroup)
    tensor = torch.full((2,), float(me.rank))
    dist.broadcast(tensor, src=members[-1], group=subgroup)
    return world_s, subgroup_s, members, tensor[0].item()


def test_nobody_waits_for_the_dead(tmp_path):
    with Ranks(rebuild_all, 4, tmp_path, timeout_s=60) as ranks:
        ranks.heard_from_all()
        ranks.signal(2, signal.SIGKILL)
        results = ranks.join(lost=(2,))
    assert all(max(result[:2]) < 10 for result in results if result), "of a timeout of 60 s"
    # The survivors of 1, 2, 3 are 1 and 3, which are 1 and 2 in the new world.
    assert [result[2:] for result in results if result] == [([], 0.0)] + [([1, 2], 3.0)] * 2


def rebuild_while_others_wait(me: Rank) -> str:
    me.say("ready")
    raised = ""
    if me.rank != 0:
        with pytest.raises(gd.CollectiveAborted) as caught:
            dist.barrier()
        raised = type(caught.value).__name__
    gd.rebuild()
    check_group(3)
    return raised


def test_rebuilding_a_group_that_works_calls_the_others(tmp_path):
    with Ranks(rebuild_while_others_wait, 3, tmp_path) as ranks:
        assert ranks.join() == ["", "CollectiveAborted", "CollectiveAborted"]


def excluded(me: Rank) -> None:
    me.say("ready")
    try:
        while True:
            dist.all_reduce(torch.ones(10))
            time.sleep(0.001)
    except dist.DistBackendError:
        pass
    if me.rank == 1:  # thawed: the others have gone on
        with pytest.raises(gd.WorldTooSmall, match="went on without rank 1"):
            gd.rebuild(timeout=timedelta(seconds=10))
        return
    gd.rebuild(timeout=timedelta(seconds=6))
    check_group(2)
    me.say("rebuilt")
    time.sleep(0.5)
    check_group(2)


def test_a_frozen_rank_is_left_out(tmp_path):
    with Ranks(excluded, 3, tmp_path, timeout_s=2.0) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGSTOP)
        assert [ranks.heard(rank) for rank in (0, 2)] == ["rebuilt"] * 2
        ranks.signal(1, signal.SIGCONT)
        ranks.join()


def frozen_store(me: Rank) -> None:
    """torch's client would wait for it without a bound."""
    dist.barrier()
    if me.rank == 0:
        os.kill(me.store_pid, signal.SIGSTOP)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(gd.CollectiveTimeout, match="the store did not answer in time"):
        gd.rebuild(timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 2
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = backend.options
    options._timeout = timedelta(seconds=1)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="could not open its group"):
        type(backend)(me.store("another"), me.rank, me.size, options)
    assert time.monotonic() - began < 3
    if me.rank == 0:
        time.sleep(1)  # until rank 1 has given up, too
        os.kill(me.store_pid, signal.SIGCONT)
    gd.rebuild(timeout=timedelta(seconds=20))
    check_group(2)


def test_a_frozen_store(tmp_path):
    run(frozen_store, 2, tmp_path)


def threads_in_rebuild(me: Rank) -> None:
    """One of two threads is refused, and the group is whole after it."""
    outcomes = []

    def rebuild() -> None:
        try:
            gd.rebuild(timeout=timedelta(seconds=20))
            outcomes.append("rebuilt")
        except RuntimeError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=rebuild) for _ in range(2)]
    if me.rank == 0:
        time.sleep(0.5)  # so that the first thread of rank 1 is still waiting
        del threads[1]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes.count("rebuilt") == 1, outcomes
    assert all("being rebuilt by another thread" in each for each in outcomes if each != "rebuilt")
    check_group(2)


def test_two_threads_rebuild(tmp_path):
    run(threads_in_rebuild, 2, tmp_path)


def any_order(me: Rank, by_hand: bool) -> None:
    """Some ranks rebuild the world first, others a subgroup: torch's tables are right on all."""
    trio = dist.new_group([1, 2, 3])
    groups = [dist.group.WORLD] if me.rank == 0 else [dist.group.WORLD, trio]
    mine = [gd.get_reconfigure_handle(group) for group in groups]
    handles: list[list[str]] = [[]] * me.size
    dist.all_gather_object(handles, mine)
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(1000)))

    def rebuild(index: int) -> None:
        if by_hand:
            survivors = [0, 2, 3] if index == 0 else [2, 3]
            gd.reconfigure(7, [handles[rank][index] for rank in survivors], groups[index])
        else:
            gd.rebuild(groups[index], timeout=timedelta(seconds=20))

    # Threads, since each of the two groups waits for the other rank.
    threads = [threading.Thread(target=rebuild, args=(index,)) for index in range(len(groups))]
    for thread in threads if me.rank == 2 else threads[::-1]:
        thread.start()
        thread.join(1)
    for thread in threads:
        thread.join(20)
    check_group(3)
    if me.rank != 0:
        check_group(2, trio)
        assert dist.get_process_group_ranks(trio) == [1, 2]
        tensor = torch.tensor([float(me.rank)])
        dist.broadcast(tensor, src=2, group=trio)
        assert tensor.item() == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_groups_rebuilt_in_any_order(by_hand, tmp_path):
    with Ranks(any_order, 4, tmp_path, by_hand) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        ranks.join(lost=(1,))


def interrupted(me: Rank, by_hand: bool) -> None:
    """Ctrl-C after the group is built and before torch's tables are: the next try mends them."""
    import torch_gpumode.distributed._groups as groups
    import torch_gpumode.distributed._rebuild as rebuild

    handles: list[str] = [""] * me.size
    pair = dist.new_group([1, 2, 3])
    dist.all_gather_object(handles, gd.get_reconfigure_handle())
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(1000)))
    survivors = [handles[rank] for rank in (0, 2, 3)]

    def go_on(uuid: int) -> None:
        if by_hand:
            gd.reconfigure(uuid, survivors)
        else:
            gd.rebuild(timeout=timedelta(seconds=20))

    remember = groups.remember_members

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    groups.remember_members = rebuild.remember_members = interrupt
    with pytest.raises(KeyboardInterrupt):
        go_on(1)
    groups.remember_members = rebuild.remember_members = remember
    dist.barrier()  # the group is built, on all ranks
    go_on(2)
    check_group(3)
    if me.rank != 0:
        assert dist.get_process_group_ranks(pair) == [1, 2]
        assert [dist.get_group_rank(pair, rank) for rank in (1, 2)] == [1, 2]


@pytest.mark.parametrize("by_hand", [False, True])
def test_interrupted(by_hand, tmp_path):
    with Ranks(interrupted, 4, tmp_path, by_hand) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        ranks.join(lost=(1,))


def too_small(me: Rank) -> None:
    me.say("ready")
    with pytest.raises(gd.PeerLost):
        repeat(lambda: dist.all_reduce(torch.ones(10)))
    with pytest.raises(gd.WorldTooSmall, match="min_size is 3"):
        gd.rebuild(timeout=timedelta(seconds=10), min_size=3)


def test_min_size(tmp_path):
    with Ranks(too_small, 3, tmp_path) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        ranks.join(lost=(1,))


def train_through_loss(me: Rank) -> tuple[list[float], list[float]]:
    """DDP on the same group object: after the loss, gradients are averaged over who is left."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    weight = model.module.weight
    store = me.store("go")

    def step() -> list[float]:
        model.zero_grad()
        # The gradient of rank r is [r + 1] * 3, r being the rank that it was born with.
        model(torch.full((1, 3), float(me.rank + 1))).sum().backward()
        return weight.grad.flatten().tolist()

    before = step()
    me.say("ready")
    store.wait(["killed"])
    with pytest.raises(gd.PeerLost):
        repeat(step, 3)
    gd.rebuild(timeout=timedelta(seconds=20))
    step()
    return before, step()


def test_ddp_goes_on(tmp_path):
    with Ranks(train_through_loss, 4, tmp_path) as ranks:
        ranks.heard_from_all()
        ranks.signal(1, signal.SIGKILL)
        ranks.store("go").set("killed", "1")
        results = ranks.join(lost=(1,))
    for before, after in (results[rank] for rank in (0, 2, 3)):
        assert before == [(1 + 2 + 3 + 4) / 4] * 3
        assert after == pytest.approx([(1 + 3 + 4) / 3] * 3)
