"""Groups made from groups: new_group, split_group; options; many of them."""

from __future__ import annotations

import copy
import gc
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, run

import torch_gpumode.distributed as gd


def total(group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def new_groups(me: Rank) -> None:
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = evens if me.rank % 2 == 0 else odds
    assert total(mine) == (2 if me.rank % 2 == 0 else 4)
    assert dist.get_rank(mine) == me.rank // 2
    one = dist.new_group([3])
    if me.rank == 3:
        assert total(one) == 3
    local = dist.new_group([0, 1], use_local_synchronization=True) if me.rank < 2 else None
    if local is not None:
        assert total(local) == 1
    dist.destroy_process_group(mine)
    assert total(dist.group.WORLD) == 6


def test_new_group(tmp_path):
    run(new_groups, 4, tmp_path)


def split_groups(me: Rank) -> None:
    """torch wants an accelerator for split_group, so the C++ function below it is called."""
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")
    mine = [[0, 2], [1, 3]][me.rank % 2]
    for _ in range(2):
        child = world.split_group(
            mine, group_name=f"split{me.rank % 2}", timeout=timedelta(seconds=9)
        )
        assert child.size() == 2
        assert child.rank() == mine.index(me.rank)
        tensor = torch.tensor([float(me.rank)])
        child.allreduce([tensor]).wait()
        assert tensor.item() == sum(mine)
        backend = child._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=9)
        assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=30)
        assert backend is child._get_backend(torch.device("cuda"))
        child.shutdown()
    outside = world.split_group([0, 1], group_name="pair") if me.rank < 2 else None
    assert (outside is not None) == (me.rank < 2)
    world._get_backend(torch.device("cpu")).perform_nocolor_split(torch.device("cuda:0"))


def test_split_group(tmp_path):
    run(split_groups, 4, tmp_path)


def dropped_splits(me: Rank) -> None:
    """A child that nobody holds is gone, though its parent knows it by name."""
    for i in range(20):
        if i == 5:
            before = _footprint()
        child = dist.group.WORLD.split_group([0, 1], group_name=f"child{i}")
        child.allreduce([torch.ones(1)]).wait()
        del child
        dist.barrier()
    assert _footprint()[1:] == before[1:]


def test_dropped_splits(tmp_path):
    run(dropped_splits, 2, tmp_path)


def options(me: Rank) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    assert backend.supports_coalescing
    given = backend.options
    copied = copy.deepcopy(given)
    copied._timeout = timedelta(seconds=7)
    assert given._timeout == timedelta(seconds=30)
    assert copied._timeout == timedelta(seconds=7)
    assert type(copied) is type(given)
    assert copied.global_ranks_in_group == given.global_ranks_in_group
    if hasattr(given, "group_name"):
        assert copied.group_name == given.group_name
    group = dist.new_group(list(range(me.size)), pg_options=copied, timeout=timedelta(seconds=8))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=8)


def names(me: Rank) -> None:
    world = dist.group.WORLD
    assert dist.get_backend() == "gpumode"
    assert world._get_backend(torch.device("cpu")).name() == "gpumode"
    assert type(world) is dist.ProcessGroup  # batched point-to-point asks for exactly this
    cpu, cuda = (world._get_backend(torch.device(device)) for device in ("cpu", "cuda"))
    assert cpu is cuda


def defaults(me: Rank) -> None:
    gd.set_as_default("cpu")
    assert dist.get_default_backend_for_device("cpu") == "gpumode"


@pytest.mark.parametrize("function", [options, names, defaults])
def test_properties(function, tmp_path):
    run(function, 2, tmp_path)


def detail(me: Rank) -> None:
    """Case B4: torch's own checks between ranks see no mismatch where there is none."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    me.init()
    peer = me.rank ^ 1
    for step in range(3):
        if me.rank < 2:  # the others do not take part
            ops = [
                dist.P2POp(dist.isend, torch.full((3,), float(step)), peer),
                dist.P2POp(dist.irecv, received := torch.empty(3), peer),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (received == step).all()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0, 3.0]
        gathered = torch.empty(3)
        dist.all_gather_into_tensor(gathered, torch.tensor([float(me.rank)]))
        assert gathered.tolist() == [0.0, 1.0, 2.0]
        scattered = torch.empty(1)
        dist.reduce_scatter_tensor(scattered, torch.ones(3))
        exchanged = torch.empty(3)
        dist.all_to_all_single(exchanged, torch.full((3,), float(me.rank)))
        assert exchanged.tolist() == [0.0, 1.0, 2.0]
        dist.barrier()
    assert gd.get_reconfigure_handle().startswith("gpumode")
    # From torch 2.14 on a Gloo group lies before ours, which cannot be rebuilt.
    if hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "wrapped_pg"):
        with pytest.raises(RuntimeError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
            gd.rebuild()
    else:
        gd.rebuild()
    dist.barrier()


def test_torch_debug_detail(tmp_path):
    run(detail, 3, tmp_path, init=False)


def _footprint() -> tuple[int, int, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident_kib = int(status.split("VmRSS:")[1].split()[0])
    return (
        resident_kib,
        len(os.listdir("/proc/self/fd")),
        int(status.split("Threads:")[1].split()[0]),
    )


def many_groups(me: Rank, rounds: int, warm_up: int) -> None:
    for i in range(rounds):
        if i == warm_up:
            before = _footprint()
        group = dist.new_group(list(range(me.size)))
        if i % 10 == 0:
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            assert tensor[0] == me.size
        dist.destroy_process_group(group)
    resident_kib, num_fds, num_threads = (a - b for a, b in zip(_footprint(), before, strict=True))
    assert num_fds <= 0
    assert num_threads <= 0
    assert resident_kib < 16 * 1024, f"{resident_kib} KiB more after {rounds - warm_up} groups"


def test_a_thousand_groups(tmp_path):
    """Case B7."""
    run(many_groups, 2, tmp_path, 1100, 100, limit_s=110)


def out_of_order(me: Rank) -> None:
    """Two groups used in another order by each of two threads do not wait for each other."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = groups if me.rank == 0 else groups[::-1]
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    threads = [threading.Thread(target=lambda g=g: total(g)) for g in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_groups_in_another_order(tmp_path):
    run(out_of_order, 2, tmp_path)
