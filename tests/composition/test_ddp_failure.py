"""A rank that raises in its forward or its hook: the others raise too, and all may go on."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, Ranks, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_gpumode.distributed as gd


class Fails(nn.Module):
    """Raises in the forward while `failing`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net, self.failing = mlp(seed=rank), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.failing:
            raise ArithmeticError("a batch that cannot be trained on")
        return self.net(inputs)


def start(me: Rank, **settings: object) -> DDP:
    """Two good steps, and a forward that fails on rank 1 from then on."""
    model = DDP(Fails(me.rank), bucket_cap_mb=1e-5, **settings)
    train(model, sgd(model), me.rank, steps=2)
    model.module.failing = me.rank == 1
    return model


def raise_and_die(me: Rank) -> None:
    """The timeout is longer than the test may take: nobody waits for it."""
    model = start(me)
    with pytest.raises(ArithmeticError if me.rank == 1 else gd.PeerLost) as caught:
        train(model, sgd(model), me.rank)
    if me.rank == 1:
        os._exit(1)
    assert caught.value.ranks == [1]


def test_raise_and_die(tmp_path):
    with Ranks(raise_and_die, 3, tmp_path, timeout_s=600, limit_s=30) as ranks:
        ranks.join(lost=(1,))


def raise_and_stay(me: Rank) -> None:
    """The rank lives, and does something else: the others raise when their time is up."""
    model = start(me)
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    with pytest.raises(ArithmeticError if me.rank == 1 else gd.CollectiveTimeout):
        train(model, sgd(model), me.rank)
    if me.rank == 1:
        me.store("done").wait(["0", "2"])
    else:
        me.store("done").set(str(me.rank), "1")


def test_raise_and_stay(tmp_path):
    run(raise_and_stay, 3, tmp_path, timeout_s=600, limit_s=30)


SETTINGS = [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


def raise_and_go_on(me: Rank, settings: dict) -> None:
    """All rebuild, take the step back and train on with the same DDP and optimizer."""
    model = start(me, **settings)
    model.module.net.load_state_dict(mlp().state_dict())
    optimizer = sgd(model)
    for step in range(4):
        model.module.failing = me.rank == 1 and step == 2
        optimizer.zero_grad()
        try:
            loss_of(model, me.rank, step).backward()
        except (ArithmeticError, dist.DistBackendError):
            assert step == 2
            model.module.failing = False
            gd.rebuild(timeout=timedelta(seconds=20))
            optimizer.zero_grad()
            loss_of(model, me.rank, step).backward()
        optimizer.step()
    assert_same(model, train_alone(mlp(), me.size, steps=4))


@pytest.mark.parametrize("settings", SETTINGS)
def test_raise_and_go_on(settings, tmp_path):
    run(raise_and_go_on, 3, tmp_path, settings, timeout_s=600, limit_s=30)


def raise_in_a_hook(me: Rank) -> None:
    """For the second of several buckets, so that the others wait in their backward.

    What a link of a chain of futures raises reaches backward as a RuntimeError with its text.
    """
    model = DDP(mlp(), bucket_cap_mb=1e-5)

    def hook(_, bucket):
        if me.rank == 1 and bucket.index() == 1:
            raise ArithmeticError("a hook that breaks")
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    error, text = (ArithmeticError, "breaks") if me.rank == 1 else (RuntimeError, "PeerLost")
    with pytest.raises(error, match=text):
        train(model, sgd(model), me.rank)
    if me.rank == 1:
        os._exit(1)


def test_raise_in_a_hook(tmp_path):
    with Ranks(raise_in_a_hook, 3, tmp_path, timeout_s=600, limit_s=30) as ranks:
        ranks.join(lost=(1,))
