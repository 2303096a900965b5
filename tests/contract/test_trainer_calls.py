"""The contract as a table: what trainers call on groups, besides collectives on a tensor.

From the habits of TorchTitan, Megatron, DeepSpeed, Accelerate, Lightning and the like. Each call
works with the right values, or says what is missing.
"""

from __future__ import annotations

import inspect
import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, check_group, run
from torch.distributed import distributed_c10d
from torch.distributed.collective_utils import all_gather as all_gather_results
from torch.distributed.collective_utils import broadcast as broadcast_result
from torch.distributed.utils import (
    _sync_module_states,
    _verify_param_shape_across_processes,
)

import torch_gpumode.distributed as gd

SIZE = 4
CPU = torch.device("cpu")


def check_members(group: dist.ProcessGroup, members: list[int]) -> None:
    """Compares everything that torch says of the members of a group."""
    me = dist.get_rank()
    assert dist.get_process_group_ranks(group) == members
    assert [dist.get_global_rank(group, rank) for rank in range(len(members))] == members
    assert [dist.get_group_rank(group, each) for each in members] == list(range(len(members)))
    assert (dist.get_rank(group), dist.get_world_size(group)) == (members.index(me), len(members))
    assert (group.rank(), group.size()) == (members.index(me), len(members))
    gathered = torch.empty(len(members))
    dist.all_gather_into_tensor(gathered, torch.tensor([me + 0.5]), group=group)
    assert gathered.tolist() == [each + 0.5 for each in members]


# --- Groups


def new_subgroups(me: Rank) -> None:
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    check_members(mine, [0, 1] if me.rank < 2 else [2, 3])


def new_subgroups_by_enumeration(me: Rank) -> None:
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]], timeout=timedelta(seconds=9))
    check_members(mine, [0, 3] if me.rank in (0, 3) else [1, 2])
    assert mine._get_backend(CPU).options._timeout == timedelta(seconds=9)


def local_groups(me: Rank) -> None:
    """Made by the members only. Each rank makes one: else torch 2.14 counts groups differently."""
    members = [0, 3] if me.rank in (0, 3) else [1, 2]
    group = dist.new_group(members, use_local_synchronization=True, group_desc="experts")
    check_members(group, members)
    assert group.group_desc == "experts"
    assert distributed_c10d._resolve_process_group(group.group_name) is group


def unsorted_groups(me: Rank) -> None:
    group = dist.new_group([3, 0, 2])
    if me.rank != 1:
        check_members(group, [0, 2, 3])
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == dist.get_world_size(group) == -1
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        group = dist.new_group([3, 0, 2], sort_ranks=False)
        if me.rank != 1:
            check_members(group, [3, 0, 2])


def names(me: Rank) -> None:
    world = dist.group.WORLD
    group = dist.new_group(group_desc="data")
    assert (world.group_desc, group.group_desc) == ("default_pg", "data")
    assert world.group_name != group.group_name
    assert distributed_c10d._resolve_process_group(group.group_name) is group
    assert distributed_c10d._get_process_group_name(group) == group.group_name
    assert world.bound_device_id is None
    assert {device.type for device in world._device_types} == {"cpu", "cuda"}
    assert world._get_backend_name() == "custom"
    assert dist.Backend("gpumode") == dist.Backend.GPUMODE == dist.get_backend(group)
    assert dist.is_backend_available("gpumode")
    assert distributed_c10d._get_object_coll_device(group) == "cpu"
    ranks = list(range(me.size))
    assert distributed_c10d._find_pg_by_ranks_and_tag("", ranks) is not None
    config = distributed_c10d._get_pg_config(group)
    assert config["pg_desc"] == "data"
    assert config["backend_config"] == "cpu:gpumode,cuda:gpumode"


def destroyed_groups(me: Rank) -> None:
    for _ in range(3):
        group = dist.new_group()
        check_members(group, list(range(me.size)))
        dist.destroy_process_group(group)
        with pytest.raises((ValueError, RuntimeError), match=r"[Gg]roup"):
            dist.all_reduce(torch.ones(1), group=group)


def split_group(me: Rank) -> None:
    """torch asks for an accelerator; test_mesh.py splits with a pretended one."""
    with pytest.raises(RuntimeError, match=r"[dD]evice"):
        dist.split_group(split_ranks=[[0, 1], [2, 3]])


def shrink_group(me: Rank) -> None:
    """Not there yet: what is, is reconfigure."""
    if hasattr(dist, "shrink_group") and me.rank != 3:
        with pytest.raises((TypeError, NotImplementedError), match="shrink"):
            dist.shrink_group([3])


def timeouts(me: Rank) -> None:
    group = dist.new_group(timeout=timedelta(seconds=11))
    backend = group._get_backend(CPU)
    assert backend.options._timeout == timedelta(seconds=11)
    assert distributed_c10d._get_default_timeout("gpumode") == timedelta(minutes=30)
    with warnings.catch_warnings(record=True) as caught:
        distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), group)
    if any("only supported for either nccl or gloo" in str(each.message) for each in caught):
        return  # torch before 2.14, which leaves the timeout as it is
    assert backend.options._timeout == timedelta(seconds=0.2)
    if me.rank == 0:
        with pytest.raises(gd.CollectiveTimeout):
            dist.recv(torch.empty(1), 1, group=group)
    for each in (None, dist.new_group()):
        distributed_c10d._set_pg_timeout(timedelta(seconds=17), each)
        pg = each or dist.group.WORLD
        assert pg._get_backend(CPU).options._timeout == timedelta(seconds=17)


GROUPS = [
    *(new_subgroups, new_subgroups_by_enumeration, local_groups, unsorted_groups, names),
    *(destroyed_groups, split_group, shrink_group, timeouts),
]

# --- Objects and barriers


def objects(me: Rank) -> None:
    mine = {"rank": me.rank, "many": list(range(10_000 * me.rank))}
    everything = [{"rank": rank, "many": list(range(10_000 * rank))} for rank in range(me.size)]
    gathered = [None] * me.size
    dist.all_gather_object(gathered, mine)
    assert gathered == everything
    gathered = [None] * me.size if me.rank == 2 else None
    dist.gather_object(mine, gathered, dst=2)
    assert me.rank != 2 or gathered == everything
    for device in (None, CPU):
        sent = [mine, "text", None] if me.rank == 1 else [None, None, 3]
        dist.broadcast_object_list(sent, src=1, device=device)
        assert sent == [everything[1], "text", None]
    received = [None]
    dist.scatter_object_list(received, everything if me.rank == 3 else None, src=3)
    assert received == [mine]


def objects_in_subgroup(me: Rank) -> None:
    group = dist.new_group([1, 3])
    if me.rank in (1, 3):
        gathered = [None] * 2
        dist.all_gather_object(gathered, me.rank, group=group)
        assert gathered == [1, 3]
        sent = [me.rank]
        dist.broadcast_object_list(sent, group=group, group_src=1)
        assert sent == [3]


def objects_to_one(me: Rank) -> None:
    if me.rank == 0:
        for source in (2, 1, 3):  # not from anybody: torch wants to know
            received = [None, None]
            assert dist.recv_object_list(received, src=source) == source
            assert received == [source, "x" * source]
    else:
        dist.send_object_list([me.rank, "x" * me.rank], dst=0)


def results_of_one(me: Rank) -> None:
    """What torch's own modules use, for a result or the exception instead of it."""
    assert broadcast_result(lambda: f"from {me.rank}", rank=2, pg=dist.group.WORLD) == "from 2"
    assert all_gather_results(lambda: me.rank, pg=dist.group.WORLD) == [0, 1, 2, 3]

    def fails() -> None:
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match="Rank 1 failed: exception 'lost'"):
        broadcast_result(fails, rank=1, pg=dist.group.WORLD)


def barriers(me: Rank) -> None:
    """Each must be passed by nobody before all have come."""
    ways: list[Callable[[], object]] = [
        dist.barrier,
        lambda: dist.barrier(async_op=True).wait(),
        lambda: dist.barrier(device_ids=[0]),
        lambda: dist.group.WORLD.barrier().wait(),
        lambda: dist.monitored_barrier(timeout=timedelta(seconds=9)),
    ]
    store = me.store("barriers")
    for i, barrier in enumerate(ways):
        store.add(f"come{i}", 1)
        try:
            barrier()
        except ValueError as error:  # on all ranks, before anybody waits
            assert "only implemented for GLOO" in str(error)  # noqa: PT017
            continue
        assert store.add(f"come{i}", 0) == me.size


TALKING = [objects, objects_in_subgroup, objects_to_one, results_of_one, barriers]

# --- Models


def random_module(seed: int, norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)]
    module = torch.nn.Sequential(*layers)
    module[1].running_mean.normal_()
    return module


def synchronised_modules(me: Rank) -> None:
    """Parameters and buffers of the first rank, as a wrapper does when it is made."""
    module, first = random_module(me.rank), random_module(0)
    pg = dist.group.WORLD
    _verify_param_shape_across_processes(pg, list(module.parameters()))
    _sync_module_states(module, pg, 250_000_000, 0, ())
    for ours, theirs in zip(module.state_dict().items(), first.state_dict().items(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]
    wrong = torch.nn.Linear(5, 4 + (me.rank == 2))
    if me.rank == 2:  # differs from the first rank, and is told so
        with pytest.raises(RuntimeError, match="not to match sizes of the same param"):
            _verify_param_shape_across_processes(pg, list(wrong.parameters()))
    else:
        _verify_param_shape_across_processes(pg, list(wrong.parameters()))
    check_group(me.size)


def broadcast_coalesced(me: Rank) -> None:
    """In buckets, of other sizes than the tensors, and of several dtypes."""
    kinds = [torch.float32, torch.float64, torch.int64, torch.float32, torch.bfloat16]
    everyones = [
        [(9 * torch.randn(7, generator=torch.Generator().manual_seed(10 * r + i))).to(kind)
         for i, kind in enumerate(kinds)]
        for r in range(me.size)
    ]  # fmt: skip
    mine = everyones[me.rank]
    dist._broadcast_coalesced(dist.group.WORLD, mine, 40, 3)
    assert all(map(torch.equal, mine, everyones[3]))


def sync_batch_norm(me: Rank) -> None:
    """torch wants the batch on an accelerator; it says so."""
    module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(random_module(0))
    assert isinstance(module[1], torch.nn.SyncBatchNorm)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        module(torch.randn(3, 5))
    check_group(me.size)


MODELS = [synchronised_modules, broadcast_coalesced, sync_batch_norm]


def every(me: Rank, functions: list[Callable[[Rank], None]]) -> None:
    for function in functions:
        function(me)
        dist.barrier()


@pytest.mark.parametrize(
    "functions", [GROUPS, TALKING, MODELS], ids=["groups", "objects", "models"]
)
def test_calls(functions, tmp_path):
    run(every, SIZE, tmp_path, functions)


# --- init_process_group


def check_world(size: int) -> None:
    assert dist.get_backend() == "gpumode"
    assert dist.group.WORLD._get_backend(CPU).options._timeout == timedelta(seconds=19)
    for group in (dist.group.WORLD, dist.new_group()):
        check_members(group, list(range(size)))
    dist.barrier()


def free_port(me: Rank) -> int:
    """A port that was free a moment ago."""
    if me.rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            me.store().set("port", str(listener.getsockname()[1]))
    return int(me.store().get("port"))


def from_environment(me: Rank) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(me)),
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "LOCAL_RANK": str(me.rank),
    }
    dist.init_process_group("gpumode", timeout=timedelta(seconds=19))
    assert dist.get_node_local_rank() == me.rank
    check_world(2)


def by_tcp(me: Rank) -> None:
    dist.init_process_group(
        "gpumode",
        init_method=f"tcp://127.0.0.1:{free_port(me)}",
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=19),
    )
    check_world(2)


def by_file(me: Rank) -> None:
    dist.init_process_group(
        "gpumode",
        init_method=f"file://{me.folder}/rendezvous",
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=19),
    )
    check_world(2)


def by_hash_store(me: Rank) -> None:
    """A world of one, in a store that no other process reaches."""
    dist.init_process_group(
        "gpumode", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=19)
    )
    check_world(1)


def with_options(me: Rank) -> None:
    me.init(timeout_s=30)
    options = dist.group.WORLD._get_backend(CPU).options
    dist.destroy_process_group()
    options._timeout = timedelta(seconds=5)  # the argument counts
    me.init(timeout_s=19, store=me.store("again"), pg_options=options)
    check_world(2)
    assert options._timeout == timedelta(seconds=5)
    with pytest.raises(ValueError, match="pg_options"):
        dist.new_group(pg_options=object())


def without_backend(me: Rank) -> None:
    gd.set_as_default("cpu")
    gd.set_as_default("cuda")
    dist.init_process_group(
        rank=me.rank, world_size=me.size, store=me.store(), timeout=timedelta(seconds=19)
    )
    assert dist.group.WORLD._get_backend(CPU).name() == "gpumode"
    check_members(dist.new_group(), list(range(me.size)))


@pytest.mark.parametrize(
    "function",
    [from_environment, by_tcp, by_file, by_hash_store, with_options, without_backend],
)
def test_init(function, tmp_path):
    run(function, 2, tmp_path, init=False)


def abort_and_begin_again(me: Rank) -> None:
    """As programs do that restart within the process."""
    me.init()
    group = dist.new_group()
    works = [dist.irecv(torch.empty(1), 1 - me.rank, pg) for pg in (None, group)]
    distributed_c10d._abort_process_group(group)
    with pytest.raises(gd.CollectiveAborted):
        works[1].wait()
    distributed_c10d._abort_process_group()
    with pytest.raises(gd.CollectiveAborted):
        works[0].wait()
    assert not dist.is_initialized()
    me.init(store=me.store("again"))
    check_members(dist.group.WORLD, [0, 1])


def test_abort(tmp_path):
    run(abort_and_begin_again, 2, tmp_path, init=False)
