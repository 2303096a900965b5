"""Overlapping groups, singletons included, made, used and destroyed in every kind of order."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from _ranks import Rank, run

MEMBERS = [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2,), (0, 1)]


def orders(me: Rank) -> None:
    same_on_all, own = random.Random(7), random.Random(100 + me.rank)
    for _ in range(8):
        made = list(enumerate(MEMBERS))
        same_on_all.shuffle(made)
        groups = {}
        for index, members in made:
            group = dist.new_group(list(members))
            if me.rank in members:
                groups[index] = group
        # Async ops may start in another order on every rank.
        started = {}
        for index in own.sample(sorted(groups), len(groups)):
            x = torch.full((1000,), float((me.rank + 1) * 10**index), dtype=torch.float64)
            started[index] = (x, dist.all_reduce(x, group=groups[index], async_op=True))
        for index in own.sample(sorted(started), len(started)):
            x, work = started[index]
            work.wait()
            assert (x == sum(rank + 1 for rank in MEMBERS[index]) * 10.0**index).all()
        for index in own.sample(sorted(groups), len(groups)):
            assert dist.get_process_group_ranks(groups[index]) == list(MEMBERS[index])
            dist.destroy_process_group(groups[index])
        dist.barrier()


def test_orders(tmp_path):
    run(orders, 3, tmp_path)
