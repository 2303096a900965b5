"""Join: ranks whose batches run out go on answering, under DDP alone and with ZeRO."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, loss_of, mlp, sgd
from _ranks import Rank, run
from _values import digest
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_BATCHES = (2, 7, 4)  # of each rank


def train_until_out_of_batches(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(NUM_BATCHES[rank]):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def train_alone(ranks: int, num_steps: int, *, divide_by_all: bool = True) -> nn.Module:
    model = mlp()
    optimizer = sgd(model)
    for step in range(num_steps):
        active = [rank for rank in range(ranks) if step < NUM_BATCHES[rank]]
        optimizer.zero_grad()
        for rank in active:
            (loss_of(model, rank, step) / (ranks if divide_by_all else len(active))).backward()
        optimizer.step()
    return model


SETTINGS = [{}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}]


def uneven(me: Rank, settings: dict, divide_by_all: bool) -> str:
    model = DDP(mlp(seed=me.rank), bucket_cap_mb=1e-5, **settings)
    with model.join(divide_by_initial_world_size=divide_by_all):
        train_until_out_of_batches(model, sgd(model), me.rank)
    reference = train_alone(me.size, max(NUM_BATCHES[: me.size]), divide_by_all=divide_by_all)
    assert_same(model, reference)
    return digest(list(model.state_dict().values()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("settings", SETTINGS)
def test_uneven(settings, divide_by_all, size, tmp_path):
    assert len(set(run(uneven, size, tmp_path, settings, divide_by_all))) == 1


def stop_early(me: Rank) -> None:
    """All ranks stop when the first has no batches left."""
    model = DDP(mlp(seed=me.rank))
    join = model.join(throw_on_early_termination=True)
    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"), join:
        train_until_out_of_batches(model, sgd(model), me.rank)
    assert_same(model, train_alone(me.size, min(NUM_BATCHES)))


def test_stop_early(tmp_path):
    run(stop_early, 3, tmp_path)


def zero(me: Rank) -> str:
    """As with Gloo: torch steps the shard of a rank that is out of batches by its last gradient."""
    trained = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        model = DDP(mlp(seed=me.rank), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.3, momentum=0.9
        )
        with Join([model, optimizer]):
            train_until_out_of_batches(model, optimizer, me.rank)
        trained.append(model)
    assert_same(*trained)
    return digest(list(trained[0].state_dict().values()))


@pytest.mark.parametrize("size", [2, 3])
def test_zero(size, tmp_path):
    assert len(set(run(zero, size, tmp_path))) == 1
