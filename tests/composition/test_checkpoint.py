"""torch.distributed.checkpoint: written by one world and read by another, in threads and processes.

A rank plans with the others by object collectives on the group, and writes its shards itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from _ranks import Rank, check_group, run
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_gpumode.optim import FusedAdamW

Kind = type[torch.optim.AdamW] | type[FusedAdamW]

NUM_STEPS = 3  # before a checkpoint, and after


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of which few worlds have equal parts."""
    torch.manual_seed(seed)
    make_layer = torch.nn.Linear
    model = nn.Sequential(make_layer(7, 10), nn.Tanh(), make_layer(10, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def shard(seed: int, kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    return model, kind(model.parameters(), lr=0.02, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """All ranks have the same batches, so that any world takes the same steps."""
    for step in range(first, first + NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (7, 3))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Compares the parameters, and the optimizer's state, with those of one process alone."""
    reference, reference_optimizer = make(seed=0)
    for first in range(0, num_steps, NUM_STEPS):
        train(reference, reference_optimizer, first)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        states = optimizer.state[ours], reference_optimizer.state[theirs]
        assert states[0]["step"] == states[1]["step"] == num_steps
        torch.testing.assert_close(full(ours), theirs)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(full(states[0][name]), states[1][name])


def save_training(me: Rank, path: Path, kind: Kind) -> None:
    model, optimizer = shard(0, kind)
    train(model, optimizer, first=0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    assert_same(model, optimizer, NUM_STEPS)


def load_training(me: Rank, path: Path, kind: Kind) -> None:
    model, optimizer = shard(1, kind)
    train(model, optimizer, first=77)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same(model, optimizer, NUM_STEPS)
    train(model, optimizer, first=NUM_STEPS)
    assert_same(model, optimizer, 2 * NUM_STEPS)


@pytest.mark.parametrize(
    ("before", "saver", "after", "loader"),
    [
        (4, torch.optim.AdamW, 2, torch.optim.AdamW),
        (4, FusedAdamW, 3, FusedAdamW),
        (2, torch.optim.AdamW, 3, FusedAdamW),
        (3, FusedAdamW, 2, torch.optim.AdamW),
    ],
)
def test_another_world(before, saver, after, loader, tmp_path):
    run(save_training, before, tmp_path, tmp_path / "checkpoint", saver)
    run(load_training, after, tmp_path, tmp_path / "checkpoint", loader)


def full_state(me: Rank, kind: Kind) -> None:
    """Only the first rank has the state; the others get their shards from it, and give them."""
    model, optimizer = shard(0, kind)
    train(model, optimizer, first=0)
    states = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if me.rank > 0:
        assert all(not state for state in states)
    other, other_optimizer = shard(1, kind)
    train(other, other_optimizer, first=77)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, states[0], options=options)
    set_optimizer_state_dict(other, other_optimizer, states[1], options=options)
    assert_same(other, other_optimizer, NUM_STEPS)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
def test_full_state(kind, tmp_path):
    run(full_state, 3, tmp_path, kind)


class Counter:
    """Something with a state of its own, as a learning rate scheduler or a data loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "of": torch.tensor([self.count, 7])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"].tolist() == [state["count"], 7]
        self.count = state["count"]


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(6, 7, 5, generator=generator)
    return {
        "rows": drawn[0].double(),
        "columns": drawn[1].bfloat16(),
        "blocks": drawn[2].half(),
        "everywhere": drawn[3] > 0,
        "plain": (9 * drawn[4]).long(),
        "complex": torch.complex(drawn[4], drawn[5]),
    }


def mixed_state(seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    """All that a state may consist of, sharded in each way over a mesh of two dimensions."""
    placements = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "blocks": [Shard(0), Shard(1)],
        "everywhere": [Replicate(), Replicate()],
        "complex": [Shard(0), Shard(0)],
    }
    tensors = {
        name: distribute_tensor(whole, mesh, placements[name]) if name in placements else whole
        for name, whole in whole_tensors(seed).items()
    }
    return {
        "tensors": tensors,
        "list": [seed, f"seed {seed}", {"nested": torch.tensor([seed + 0.5])}],
        "counter": Counter(seed),
    }


def assert_loaded(state: dict[str, Any], seed: int) -> None:
    for name, whole in whole_tensors(seed).items():
        assert torch.equal(full(state["tensors"][name]), whole), name
    assert state["list"][:2] == [seed, f"seed {seed}"]
    assert state["list"][2]["nested"].item() == seed + 0.5
    assert state["counter"].count == seed


def save_then_load(
    me: Rank, save: Callable[..., Any], path: Path, shape: tuple[int, ...] = (2, 2)
) -> None:
    mesh = init_device_mesh("cpu", shape)
    save(mixed_state(5, mesh), path)
    loaded = mixed_state(6, mesh)
    dcp.load(loaded, checkpoint_id=path)
    assert_loaded(loaded, 5)


def save_now(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


def save_in_thread(state: dict[str, Any], path: Path) -> None:
    dcp.async_save(state, checkpoint_id=path).result()


def save_beside_training(backend: str, state: dict[str, Any], path: Path) -> None:
    """As trainers do: the thread has a group of its own while the default group goes on."""
    group = dist.new_group(backend=backend)
    future = dcp.async_save(state, checkpoint_id=path, process_group=group)
    sums, goes_on = 0, torch.ones(1)
    while goes_on:
        rank = torch.tensor([dist.get_rank() + 0.25])
        dist.all_reduce(rank)
        assert rank == sum(r + 0.25 for r in range(dist.get_world_size()))
        sums += 1
        goes_on = torch.tensor(not future.done())
        dist.all_reduce(goes_on, op=dist.ReduceOp.MAX)
    assert sums > 0
    assert future.result().state_dict_metadata


def in_turn(me: Rank, path: Path) -> None:
    saves = {
        "now": save_now,
        "in thread": save_in_thread,
        "beside training": lambda *args: save_beside_training("gpumode", *args),
        "beside training, on Gloo": lambda *args: save_beside_training("gloo", *args),
    }
    for name, save in saves.items():
        save_then_load(me, save, path / name)


def test_save(tmp_path):
    run(in_turn, 4, tmp_path, tmp_path / "checkpoint")


def save_in_process(state: dict[str, Any], path: Path) -> None:
    """The process has a group of its own, on Gloo, which torch does not let one choose."""
    multiprocessing.current_process()._config["daemon"] = False  # daemons have no children
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind).result()


def in_process(me: Rank, path: Path) -> None:
    save_then_load(me, save_in_process, path, shape=(2, 1))


@pytest.mark.long
def test_save_in_process(tmp_path):
    run(in_process, 2, tmp_path, tmp_path / "checkpoint")


def metadata(me: Rank, path: Path) -> None:
    """What is replicated is stored once; who has which part is in the metadata."""
    mesh = init_device_mesh("cpu", (me.size,))
    rows, replicas = torch.randn(7, 5), torch.randn(3)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "replicas": distribute_tensor(replicas, mesh, [Replicate()]),
        "plain": torch.arange(4),
    }
    saved = dcp.save(state, checkpoint_id=path)
    read = dcp.FileSystemReader(path).read_metadata()
    if me.rank == 0:
        assert saved.state_dict_metadata.keys() == state.keys()
    chunks = {
        name: [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in each.chunks]
        for name, each in read.state_dict_metadata.items()
    }
    assert chunks == {
        "rows": [((0, 0), (3, 5)), ((3, 0), (3, 5)), ((6, 0), (1, 5))],
        "replicas": [((0,), (3,))],
        "plain": [((0,), (4,))],
    }
    assert len(read.storage_data) == 5
    written_by = {
        index.offset[0]: info.relative_path
        for index, info in read.storage_data.items()
        if index.fqn == "rows"
    }
    assert written_by == {3 * rank: f"__{rank}_0.distcp" for rank in range(3)}


def without_group(me: Rank, path: Path) -> None:
    """no_dist: each rank for itself, and what it wrote is read by one that has no group."""
    mine = {"value": torch.randn(5) + me.rank, "rank": me.rank}
    dcp.save(mine, checkpoint_id=path / str(me.rank), no_dist=True)
    loaded = {"value": torch.full((5,), torch.nan), "rank": -1}
    dcp.load(loaded, checkpoint_id=path / str(me.rank), no_dist=True)
    assert torch.equal(loaded["value"], mine["value"])
    assert loaded["rank"] == me.rank


def in_subgroup(me: Rank, path: Path) -> None:
    """Ranks 1 and 2 save and load by themselves."""
    group = dist.new_group([1, 2])
    if me.rank == 0:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(14.0).view(7, 2).sin()
    dcp.save(
        {"rows": distribute_tensor(whole, mesh, [Shard(0)])},
        checkpoint_id=path,
        process_group=group,
    )
    loaded = {"rows": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(1)])}
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    assert torch.equal(loaded["rows"].full_tensor(), whole)


class FullDisk(dcp.FileSystemWriter):
    def write_data(self, *_: Any) -> Any:
        raise OSError("no space left")


def failure(me: Rank, path: Path) -> None:
    """What goes wrong on one rank is raised on all, and the group goes on."""
    state = {"rank": torch.tensor([me.rank])}
    writer = (FullDisk if me.rank == 1 else dcp.FileSystemWriter)(path)
    with pytest.raises(CheckpointException, match="no space left") as caught:
        dcp.save(state, storage_writer=writer)
    assert list(caught.value.failures) == [1]
    with pytest.raises(CheckpointException):
        dcp.load({"rank": torch.zeros(1)}, checkpoint_id=path)
    check_group(me.size)


@pytest.mark.parametrize("function", [metadata, without_group, in_subgroup, failure])
def test_planning(function, tmp_path):
    run(function, 3, tmp_path, tmp_path / "checkpoint")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_read_by_one_process(tmp_path):
    """A checkpoint of two ranks, read without any group."""
    run(save_training, 2, tmp_path, tmp_path / "checkpoint", torch.optim.AdamW)
    model, optimizer = make(seed=1)
    train(model, optimizer, first=77)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=tmp_path / "checkpoint",
        no_dist=True,
    )
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_same(model, optimizer, NUM_STEPS)
