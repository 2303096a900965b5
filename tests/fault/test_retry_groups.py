"""Retried collectives where several groups lose a rank."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _calls import die, raises, reduce, total, value
from _ranks import Rank, Ranks, check_group, run
from torch.distributed.device_mesh import init_device_mesh

import torch_gpumode.distributed as gd


def check_tables(me: Rank, members: list[int], world: list[int], group: dist.ProcessGroup) -> None:
    """What torch says of a group, whose members and the world's are given as above."""
    global_ranks = [world.index(member) for member in members]
    assert dist.get_process_group_ranks(group) == global_ranks
    for rank, each in enumerate(global_ranks):
        assert dist.get_group_rank(group, each) == rank
        assert dist.get_global_rank(group, rank) == each
    check_group(len(members), group)
    for member in members:
        for broadcast in (gd.broadcast, dist.broadcast):
            x = value(me.rank, 1)
            broadcast(x, src=world.index(member), group=group)
            assert torch.equal(x, value(member, 1))


def on_a_mesh(me: Rank, shape: tuple[int, int], lost: int, seed: int) -> None:
    """Each rank uses its row, its column and the world; in which order depends on the rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    everybody = list(range(me.size))
    lines = {
        "row": mesh.mesh[me.rank // shape[1]].tolist(),
        "column": mesh.mesh[:, me.rank % shape[1]].tolist(),
        "world": everybody,
    }
    groups = {
        "row": mesh.get_group("columns"),
        "column": mesh.get_group("rows"),
        "world": dist.group.WORLD,
    }
    for name, group in groups.items():
        assert reduce(me, lines[name], group).attempts == 1
    me.say("ready")
    me.store().wait(["go"])
    if me.rank == lost:
        die()
    left = {name: [rank for rank in line if rank != lost] for name, line in lines.items()}
    # All ranks take the groups in one order, which is another one for each of their own three.
    order = [mesh.mesh[i].tolist() for i in range(shape[0])]
    order += [mesh.mesh[:, i].tolist() for i in range(shape[1])]
    order.append(everybody)
    random.Random(seed).shuffle(order)
    for name in sorted(groups, key=lambda name: order.index(lines[name])):
        outcome = reduce(me, left[name], groups[name])
        assert outcome.contributors == tuple(
            i for i, rank in enumerate(lines[name]) if rank != lost
        )
    for name, group in groups.items():
        check_tables(me, left[name], left["world"], group)
        assert reduce(me, left[name], group).attempts == 1


@pytest.mark.parametrize(
    ("shape", "lost", "seed"), [((2, 2), 3, 0), ((2, 2), 0, 1), ((2, 3), 1, 2), ((2, 3), 4, 3)]
)
def test_mesh(shape, lost, seed, tmp_path):
    size = shape[0] * shape[1]
    with Ranks(on_a_mesh, size, tmp_path, shape, lost, seed) as ranks:
        ranks.heard_from_all()
        ranks.store("store").set("go", "")
        ranks.join(lost=(lost,))


def in_threads(me: Rank) -> None:
    """All groups at once, while the rank dies."""
    lines = [[0, 1, 2, 3], [0, 1, 2], [1, 2, 3], [0, 1, 3]]
    groups = [dist.group.WORLD] + [dist.new_group(line) for line in lines[1:]]
    failures: list[Any] = []

    def loop(line: list[int], group: dist.ProcessGroup) -> None:
        try:
            left = [rank for rank in line if rank != 1]
            for step in itertools.count():
                x = value(me.rank, step % 4)
                contributors = gd.all_reduce(x, group=group).contributors
                who = [line[rank] for rank in contributors]
                assert torch.equal(x, total(who, step % 4))
                if len(who) < len(line):
                    assert who == left
                    return
        except BaseException as error:
            failures.append(error)

    for line, group in zip(lines, groups, strict=True):
        if me.rank in line:
            reduce(me, line, group)
    mine = [(line, group) for line, group in zip(lines, groups, strict=True) if me.rank in line]
    threads = [threading.Thread(target=loop, args=args) for args in mine]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    if me.rank == 1:
        die()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures
    gd.barrier()  # so that all know who is who
    for line, group in mine:
        check_tables(me, [rank for rank in line if rank != 1], [0, 2, 3], group)


def test_threads(tmp_path):
    with Ranks(in_threads, 4, tmp_path) as ranks:
        ranks.join(lost=(1,))


def new_groups(me: Rank) -> None:
    """Made from a world that has lost a rank, and losing one themselves."""
    # torch wants an accelerator for split_group; there need not be one.
    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.device_count = lambda: me.size
    me.init(device_id=torch.device("cuda", me.rank))
    reduce(me, [0, 1, 2, 3, 4])
    if me.rank == 1:
        die()
    reduce(me, [0, 2, 3, 4])
    # First, since torch 2.11 names it after the number of groups that a rank is in.
    split = dist.split_group(split_ranks=[[0, 2, 3]])
    trio = dist.new_group([1, 2, 3])
    groups = [(trio, [2, 3, 4]), (split, [0, 3, 4]), (dist.group.WORLD, [0, 2, 3, 4])]
    groups = [(group, members) for group, members in groups if me.rank in members]
    for group, members in groups:
        check_tables(me, members, [0, 2, 3, 4], group)
        assert reduce(me, members, group).attempts == 1
    if me.rank == 3:
        die()
    for group, members in groups:
        members.remove(3)
        reduce(me, members, group)
    for group, members in groups:
        check_tables(me, members, [0, 2, 4], group)
    third = dist.new_group([0, 2])
    if me.rank in (0, 4):
        check_tables(me, [0, 4], [0, 2, 4], third)


def test_new_groups(tmp_path):
    with Ranks(new_groups, 5, tmp_path, init=False) as ranks:
        ranks.join(lost=(1, 3))


def settings(me: Rank) -> None:
    """What a group was given stays; what an epoch counts begins anew."""
    world = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    options = backend.options
    options._timeout = timedelta(seconds=21)
    options.flight_record, options.spin = 13, timedelta(microseconds=7)
    group = dist.new_group(
        [0, 1, 2], timedelta(seconds=22), pg_options=options, group_desc="the first three"
    )
    backend._set_default_timeout(timedelta(seconds=23))

    def seen(group: dist.ProcessGroup) -> list[Any]:
        options = group._get_backend(torch.device("cpu")).options
        return [
            *(group.group_name, group.group_desc, options._timeout),
            *(options.spin, options.flight_record),
        ]

    mine = [world, group] if me.rank < 3 else [world]
    for _ in range(20):
        reduce(me, [0, 1, 2, 3])
        if me.rank < 3:
            reduce(me, [0, 1, 2], group)
    before = [seen(each) for each in mine]
    assert before[0][2] == timedelta(seconds=23)
    if me.rank < 3:
        given = ["the first three", timedelta(seconds=22), timedelta(microseconds=7), 13]
        assert before[1][1:] == given
        assert len(gd.flight_record(group)["entries"]) == 13
        assert group._get_sequence_number_for_group() == 20
    if me.rank == 1:
        die()
    reduce(me, [0, 2, 3])
    if me.rank < 3:
        reduce(me, [0, 2], group)
        entries = gd.flight_record(group)["entries"]
        assert len(entries) == 13
        assert entries[-1]["collective_seq_id"] == 1
        assert entries[-1]["process_group"][1] == "the first three"
    assert [seen(each) for each in mine] == before
    assert [each._get_sequence_number_for_group() for each in mine] == [1] * len(mine)
    if me.rank != 0:
        me.store().wait(["raised"])
        return
    backend._set_default_timeout(timedelta(seconds=1))  # what is set later counts, too
    assert 0.9 < raises(gd.CollectiveTimeout, min_size=2) < 2
    me.store().set("raised", "")


def test_settings(tmp_path):
    with Ranks(settings, 4, tmp_path) as ranks:
        ranks.join(lost=(1,))


def fail(me: Rank, group: dist.ProcessGroup, i: int) -> None:
    """Makes the group fail on both of its ranks, and lose nobody."""
    if i % 2 == 0:  # by a deadline, since rank 1 is late
        if me.rank == 1:
            me.store().wait([f"failed {i}"])
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=1)
        with pytest.raises(gd.CollectiveTimeout):
            group.allreduce([value(0)], options).wait()
        me.store().set(f"failed {i}", "")
    elif me.rank == 1:
        gd.rebuild(group)
    else:
        with pytest.raises(gd.CollectiveAborted):
            gd.all_reduce(value(0), group=group)
        gd.rebuild(group)


def _footprint() -> tuple[int, int, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    return int(status.split("VmRSS:")[1].split()[0]), len(os.listdir("/proc/self/fd")), threads


def recover_often(me: Rank) -> None:
    kept = dist.group.WORLD
    for i in range(120):
        if i == 20:
            before = _footprint()
        fresh = dist.new_group([0, 1])
        for j, group in enumerate((kept, fresh)):
            fail(me, group, 2 * j * 120 + i)
            assert reduce(me, [0, 1], group) == ((0, 1), 1)
        dist.destroy_process_group(fresh)
    resident_kib, num_fds, num_threads = (a - b for a, b in zip(_footprint(), before, strict=True))
    assert num_fds <= 0
    assert num_threads <= 0
    assert resident_kib < 16 * 1024, f"{resident_kib} KiB more after 200 recoveries"


def test_nothing_is_left_behind(tmp_path):
    run(recover_often, 2, tmp_path)


def under_one_name(me: Rank) -> None:
    """Case F13: what an earlier group of the name has left in the store is not taken for ours."""
    store, seen = me.store(), me.store("seen")
    members = [0, 1, 2, 3]
    for lost in (None, None, 3, None, 1):
        replace(me, rank=members.index(me.rank), size=len(members)).init(store=store)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        epochs = [backend.uuid()]
        reduce(me, members)
        for _ in range(2):
            gd.rebuild()
            assert reduce(me, members) == (tuple(range(len(members))), 1)
            epochs.append(backend.uuid())
        if lost is not None:
            if me.rank == lost:
                die()
            contributors = tuple(i for i, rank in enumerate(members) if rank != lost)
            members.remove(lost)
            assert reduce(me, members) == (contributors, 2)
            epochs.append(backend.uuid())
        if me.rank == 0:
            assert all(seen.add(str(epoch), 1) == 1 for epoch in epochs), "two epochs, one number"
        dist.destroy_process_group()


def test_one_name(tmp_path):
    with Ranks(under_one_name, 4, tmp_path, init=False) as ranks:
        ranks.join(lost=(1, 3))
