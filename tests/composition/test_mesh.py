"""Meshes of ranks, and the backends that their groups are made of."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, check_group, run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_gpumode.distributed as gd

NEEDS_OVERRIDE = pytest.mark.skipif(
    "backend_override" not in inspect.signature(init_device_mesh).parameters,
    reason="this torch has no backend_override",
)


def total(group: dist.ProcessGroup) -> float:
    """Adds up something that tells which ranks took part."""
    tensor = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def check(group: dist.ProcessGroup, members: list[int], backend: str = "gpumode") -> None:
    """Asserts that a group has these members, and moves their values."""
    assert dist.get_process_group_ranks(group) == members
    assert dist.get_rank(group) == members.index(dist.get_rank())
    assert group._get_backend(torch.device("cpu")).name() == backend
    assert total(group) == sum(2.0**rank for rank in members)
    check_group(len(members), group)


def line(mesh: DeviceMesh, dim: int) -> list[int]:
    """Who is on a line with this rank, along a dimension of the mesh."""
    at = [int(i) for i in (mesh.mesh == dist.get_rank()).nonzero()[0]]
    at[dim] = slice(None)
    return mesh.mesh[tuple(at)].tolist()


def shapes(me: Rank) -> None:
    for shape in [(8,), (2, 4), (2, 2, 2), (1, 8), (4, 1, 2)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        assert mesh.mesh.tolist() == torch.arange(8).view(shape).tolist()
        for dim, name in enumerate(mesh.mesh_dim_names):
            members = line(mesh, dim)
            check(mesh.get_group(dim), members)
            assert mesh.get_group(name) is mesh.get_group(dim)
            assert mesh.get_local_rank(name) == members.index(me.rank)
            assert mesh.get_coordinate()[dim] == members.index(me.rank)


def slices(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    part = mesh["b", "c"]
    assert part.mesh.tolist() == mesh.mesh[me.rank // 4].tolist()
    assert part.get_group("c") is mesh.get_group("c")
    flat = mesh["a", "b"]._flatten("ab")
    check(flat.get_group(), mesh.mesh.flatten(0, 1)[:, me.rank % 2].tolist())
    if hasattr(DeviceMesh, "_concatenate"):
        joined = DeviceMesh._concatenate([mesh["a"], mesh["c"]])
        assert joined.mesh.tolist() == mesh.mesh[:, me.rank // 2 % 2].tolist()
        check(joined.get_group("a"), line(mesh, 0))
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
    if hasattr(DeviceMesh, "_unflatten"):
        parts = world._unflatten(0, (2, 4), ("x", "y"))
        check(parts["y"].get_group(), line(parts, 1))
        check(parts["x"].get_group(), line(parts, 0))
    tensor = torch.arange(30.0).view(10, 3)
    sharded = distribute_tensor(tensor, flat, [Shard(0)])
    assert sharded.to_local().tolist() == [x.tolist() for x in tensor.chunk(4)[me.rank // 2]]
    assert torch.equal(sharded.full_tensor(), tensor)


def some_ranks(me: Rank) -> None:
    mesh = DeviceMesh("cpu", [1, 3, 6], mesh_dim_names=("some",))
    if me.rank in (1, 3, 6):
        check(mesh.get_group(), [1, 3, 6])
        assert mesh.get_local_rank() == [1, 3, 6].index(me.rank)
    else:
        assert mesh.get_coordinate() is None
    square = DeviceMesh("cpu", [[0, 2], [4, 7]])
    if me.rank in (0, 2, 4, 7):
        check(square.get_group(0), line(square, 0))
        check(square.get_group(1), line(square, 1))


def made_of_groups(me: Rank) -> None:
    rows, columns = [[0, 1, 2, 3], [4, 5, 6, 7]], [[i, i + 4] for i in range(4)]
    row, column = (dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (rows, columns))
    mesh = DeviceMesh.from_group(row, "cpu")
    assert mesh.get_group().group_name == row.group_name
    assert mesh.mesh.tolist() == rows[me.rank // 4]
    mesh = DeviceMesh.from_group([column, row], "cpu", mesh=rows, mesh_dim_names=("x", "y"))
    assert mesh["x"].get_group() is column
    check(mesh.get_group("x"), columns[me.rank % 4])
    check(mesh.get_group("y"), rows[me.rank // 4])


def point_to_point(me: Rank) -> None:
    """Around each row, in ranks of the group and global ones."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("row", "column"))
    group, here = mesh.get_group("column"), mesh.get_local_rank("column")
    right, left = (here + 1) % 4, (here - 1) % 4
    sent, received = torch.tensor([me.rank + 0.5]), torch.empty(2)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=right),
            dist.P2POp(dist.irecv, received[:1], dist.get_global_rank(group, left), group),
        ]
    )
    for work in works:
        work.wait()
    work = dist.isend(sent, group=group, group_dst=left)
    dist.recv(received[1:], dist.get_global_rank(group, right), group)
    work.wait()
    first = 4 * (me.rank // 4)
    assert received.tolist() == [first + left + 0.5, first + right + 0.5]


def test_meshes(tmp_path):
    def each(me: Rank) -> None:
        for function in (shapes, slices, some_ranks, made_of_groups, point_to_point):
            function(me)

    run(each, 8, tmp_path)


def with_device_id(me: Rank) -> None:
    """Case B2: a bound device makes DeviceMesh call split_group; the tensors stay on the CPU.

    There need not be such a device: what is tested is that the backend splits.
    """
    torch.cuda.is_available = torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.device_count = lambda: me.size
    me.init(device_id=torch.device("cuda", me.rank))
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", me.rank)
    split_groups = []
    split = dist.ProcessGroup.split_group
    dist.ProcessGroup.split_group = lambda *a, **k: split_groups.append(a) or split(*a, **k)
    for shape in [(4,), (2, 2), (2, 1, 2)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        for dim in range(len(shape)):
            check(mesh.get_group(dim), line(mesh, dim))
    flat = mesh["a", "c"]._flatten("ac")
    check(flat.get_group(), [0, 1, 2, 3])
    assert split_groups


def test_with_device_id(tmp_path):
    run(with_device_id, 4, tmp_path, init=False)


def overridden(me: Rank) -> None:
    """A dimension may have a backend, a timeout or both of its own."""
    world = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = world.options
    options._timeout = timedelta(seconds=7)
    mesh = init_device_mesh(
        "cpu",
        (2, 1, 2),
        mesh_dim_names=("a", "b", "c"),
        backend_override={"a": "gloo", "b": options, 2: ("gpumode", options)},
    )
    check(mesh.get_group("a"), line(mesh, 0), "gloo")
    for name, dim in (("b", 1), ("c", 2)):
        check(mesh.get_group(name), line(mesh, dim))
        backend = mesh.get_group(name)._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    assert world.options._timeout == timedelta(seconds=30)
    tensor = torch.arange(14.0).view(7, 2)
    sharded = distribute_tensor(tensor, mesh, [Shard(0), Shard(1), Shard(0)])
    assert torch.equal(sharded.full_tensor(), tensor)


@NEEDS_OVERRIDE
def test_overridden_backend(tmp_path):
    run(overridden, 4, tmp_path)


def backend_names(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns the backend of each device of a group."""
    devices = {device.type for device in group._device_types}
    return {device: group._get_backend(torch.device(device)).name() for device in devices}


def check_all_kinds(size: int, group: dist.ProcessGroup | None = None) -> None:
    """Tensors on the CPU, objects, point-to-point and barriers of a group."""
    check_group(size, group)
    gathered = [None] * size
    dist.all_gather_object(gathered, f"rank {dist.get_rank(group)}", group=group)
    assert gathered == [f"rank {rank}" for rank in range(size)]
    rank = dist.get_rank(group)
    received = torch.empty(1)
    work = dist.isend(torch.tensor([rank + 0.5]), group=group, group_dst=(rank + 1) % size)
    dist.recv(received, group=group, group_src=(rank - 1) % size)
    work.wait()
    assert received.item() == (rank - 1) % size + 0.5
    dist.barrier(group=group)


def strings(me: Rank, text: str, expected: dict[str, str]) -> None:
    """What init_process_group makes of a backend, groups of the same, and groups of another."""
    dist.init_process_group(
        text, rank=me.rank, world_size=me.size, store=me.store(), timeout=timedelta(seconds=30)
    )
    assert dist.get_backend() == text.lower()
    assert dist.get_backend_config() == ",".join(map(":".join, expected.items()))
    assert backend_names(dist.group.WORLD) == expected
    check_all_kinds(me.size)
    same, gloo, ours = (
        dist.new_group([0, 1], backend=backend) for backend in (None, "gloo", "gpumode")
    )
    assert backend_names(same) == expected
    assert backend_names(gloo) == {"cpu": "gloo", "cuda": "gloo"}
    assert backend_names(ours) == {"cpu": "gpumode", "cuda": "gpumode"}
    for group in (same, gloo, ours):
        check_all_kinds(2, group)
    assert dist.get_backend(gloo) == "gloo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpumode", {"cpu": "gpumode", "cuda": "gpumode"}),
        ("GPUMODE", {"cpu": "gpumode", "cuda": "gpumode"}),
        ("cpu:gpumode,cuda:gpumode", {"cpu": "gpumode", "cuda": "gpumode"}),
        ("cpu:gloo,cuda:gpumode", {"cpu": "gloo", "cuda": "gpumode"}),
        # Gloo in the place of NCCL, which wants a GPU to be there.
        ("cpu:gpumode,cuda:gloo", {"cpu": "gpumode", "cuda": "gloo"}),
    ],
)
def test_backend_strings(text, expected, tmp_path):
    run(strings, 2, tmp_path, text, expected, init=False)


def beside_gloo(me: Rank) -> None:
    """Our groups in a world that is not ours, as those for checkpoints or dispatching."""
    dist.init_process_group(
        "gloo", rank=me.rank, world_size=me.size, store=me.store(), timeout=timedelta(seconds=30)
    )
    ours = dist.new_group([1, 2], backend="gpumode", timeout=timedelta(seconds=30))
    mixed = dist.new_group(backend="cpu:gpumode,cuda:gloo")
    if me.rank > 0:
        check(ours, [1, 2])
        assert gd.get_reconfigure_handle(ours).startswith("gpumode")
    check(mixed, [0, 1, 2])
    check(dist.group.WORLD, [0, 1, 2], "gloo")
    with pytest.raises(ValueError, match="no gpumode backend"):
        gd.abort(dist.group.WORLD)


def test_beside_gloo(tmp_path):
    run(beside_gloo, 3, tmp_path, init=False)


def defaults(me: Rank) -> None:
    """A mesh opens the default group by itself, and takes the default backend of the machine."""
    gd.set_as_default("cpu")
    gd.set_as_default("cuda")
    assert dist.Backend.default_device_backend_map["cpu"] == "gpumode"
    assert dist.Backend.default_device_backend_map["cuda"] == "gpumode"
    if me.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.store().set("port", str(server.port))
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": me.store().get("port").decode(),
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
    }
    mesh = init_device_mesh("cpu", (me.size,))
    check(mesh.get_group(), [0, 1])
    assert dist.get_default_backend_for_device("cpu") == "gpumode"
    dist.barrier()


def test_default_backend(tmp_path):
    run(defaults, 2, tmp_path, init=False)
