"""DistributedDataParallel: what ranks train together is what one process makes of all batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from _models import assert_same, batch, loss_of, mlp, sgd, train, train_alone
from _ranks import Rank, run
from _values import digest
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

SMALL = {"bucket_cap_mb": 1e-5}
OPTIONS = {
    "plain": {},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "small buckets": SMALL,
    "small static views": {**SMALL, "static_graph": True, "gradient_as_bucket_view": True},
    "no init sync": {"init_sync": False},
}


def options(me: Rank, name: str) -> str:
    """Ranks start apart, and train what rank 0 has."""
    model = DDP(mlp(seed=0 if name == "no init sync" else me.rank), **OPTIONS[name])
    train(model, sgd(model), me.rank, steps=4)
    assert_same(model, train_alone(mlp(), me.size, steps=4))
    num_buckets = model._get_ddp_logging_data()["num_buckets_reduced"]
    assert num_buckets == (6 if "small" in name else 1)
    return digest(list(model.state_dict().values()))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tmp_path):
    assert len(set(run(options, 3, tmp_path, name))) == 1


def one_process(me: Rank) -> None:
    model = DDP(mlp())
    train(model, sgd(model), 0)
    assert_same(model, train_alone(mlp(), 1))


def one_of_two(me: Rank) -> None:
    """Each rank trains alone, in a group of its own."""
    mine = [dist.new_group([rank]) for rank in range(me.size)][me.rank]
    model = DDP(mlp(), process_group=mine)
    train(model, sgd(model), 0)
    assert_same(model, train_alone(mlp(), 1))


@pytest.mark.parametrize(("function", "size"), [(one_process, 1), (one_of_two, 2)])
def test_group_of_one(function, size, tmp_path):
    run(function, size, tmp_path)


def many_buckets(me: Rank) -> None:
    """Several all-reduces in flight, each of 1.4 MB."""
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)])
    model = DDP(nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)]), bucket_cap_mb=1)
    model.module.load_state_dict(reference.state_dict())
    inputs = [
        torch.randn(3, 600, generator=torch.Generator().manual_seed(r)) for r in range(me.size)
    ]
    for _ in range(3):
        model.zero_grad()
        model(inputs[me.rank]).square().mean().backward()
    for each in inputs:
        (reference(each).square().mean() / me.size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert model._get_ddp_logging_data()["num_buckets_reduced"] >= 4


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


class Kinds(nn.Module):
    """A weight of each dtype, complex numbers among them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        wide = torch.randn(len(KINDS), 4, 9, generator=generator, dtype=torch.complex128)
        pairs = zip(wide, KINDS, strict=True)
        self.weights = nn.ParameterList([(w if k.is_complex else w.real).to(k) for w, k in pairs])

    def forward(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        factors = torch.randn(len(KINDS), 4, 9, generator=generator)
        pairs = zip(self.weights, factors, strict=True)
        return sum((w * f.to(w.dtype)).abs().float().sum() for w, f in pairs)


def dtypes(me: Rank) -> None:
    """Each has buckets of its own."""
    model = DDP(Kinds())
    model(me.rank).backward()
    references = [Kinds() for _ in range(me.size)]
    for rank, reference in enumerate(references):
        reference(rank).backward()
    for ours, *theirs in zip(
        model.parameters(), *(each.parameters() for each in references), strict=True
    ):
        rtol = 1e-2 if ours.dtype in (torch.bfloat16, torch.float16) else 1e-6
        expected = torch.stack([each.grad.to(torch.complex128) for each in theirs]).mean(0)
        torch.testing.assert_close(ours.grad.to(expected.dtype), expected, rtol=rtol, atol=rtol)


def two_models_in_two_groups(me: Rank) -> None:
    """Rank 1 trains both in one step, each with another rank."""
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    both = [
        DDP(mlp(seed=seed), process_group=group, **SMALL)
        for seed, group, members in ((0, left, (0, 1)), (1, right, (1, 2)))
        if me.rank in members
    ]
    optimizers = [sgd(model) for model in both]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model, me.rank, step) for model in both).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, first in zip(both, [(0,), (0, 1), (1,)][me.rank], strict=True):
        reference = mlp(seed=first)
        optimizer = sgd(reference)
        for step in range(3):
            optimizer.zero_grad()
            for rank in (first, first + 1):
                (loss_of(reference, rank, step) / 2).backward()
            optimizer.step()
        assert_same(model, reference)


def accumulate(me: Rank) -> None:
    """no_sync: a step of three batches, of which the last one's backward reduces."""
    for views in (False, True):
        model, reference, local = DDP(mlp(), gradient_as_bucket_view=views), mlp(), mlp()
        ours, theirs = sgd(model), sgd(reference)
        for step in range(3):
            ours.zero_grad(), theirs.zero_grad()
            with model.no_sync():
                for part in (0, 1):
                    loss_of(model, me.rank, 3 * step + part).backward()
            if step == 0:  # nothing has been reduced yet
                (loss_of(local, me.rank, 0) + loss_of(local, me.rank, 1)).backward()
                for mine, expected in zip(model.parameters(), local.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, expected.grad)
            loss_of(model, me.rank, 3 * step + 2).backward()
            for rank in range(me.size):
                for part in range(3):
                    (loss_of(reference, rank, 3 * step + part) / me.size).backward()
            ours.step(), theirs.step()
            assert_same(model, reference)


def keep_gradients(me: Rank) -> None:
    """zero_grad(set_to_none=False) writes zeros into the buckets that the next step reduces."""
    for views in (False, True):
        model = DDP(mlp(), gradient_as_bucket_view=views)
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 1)
            loss_of(model, me.rank, step).backward()
            optimizer.step()
        assert_same(model, train_alone(mlp(), me.size, steps=4))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.net[:2], inputs.requires_grad_(), use_reentrant=self.reentrant)
        return self.net[2:](hidden)


def checkpointed(me: Rank) -> None:
    for reentrant in (False, True):
        model = DDP(Checkpointed(reentrant=reentrant), static_graph=reentrant)
        train(model, sgd(model), me.rank)
        assert_same(model, train_alone(mlp(), me.size))


def on_a_mesh(me: Rank) -> None:
    model = DDP(mlp(seed=me.rank), device_mesh=init_device_mesh("cpu", (me.size,)))
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


def composed(me: Rank) -> None:
    """DDP's reducer, without its wrapper."""
    model = replicate(mlp(seed=me.rank), bucket_cap_mb=1e-5)
    train(model, sgd(model), me.rank)
    assert_same(model, train_alone(mlp(), me.size))


def ignored(me: Rank) -> None:
    """The last layer is left to each rank: its start, and its gradient."""
    net, reference = mlp(seed=me.rank), mlp()
    reference[4].load_state_dict(net[4].state_dict())
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["4.weight", "4.bias"])
    model = DDP(net)
    loss_of(model, me.rank).backward()
    alone = mlp(seed=me.rank)
    alone[:4].load_state_dict(reference[:4].state_dict())
    loss_of(alone, me.rank).backward()
    assert torch.equal(net[4].weight.grad, alone[4].weight.grad)
    for rank in range(me.size):
        reference[4].load_state_dict(mlp(seed=rank)[4].state_dict())
        (loss_of(reference, rank) / me.size).backward()
    torch.testing.assert_close(net[0].weight.grad, reference[0].weight.grad)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "function",
    [many_buckets, dtypes, accumulate, keep_gradients, checkpointed, on_a_mesh, composed, ignored],
)
def test_steps(function, size, tmp_path):
    run(function, size, tmp_path)


def test_two_models_in_two_groups(tmp_path):
    run(two_models_in_two_groups, 3, tmp_path)


class Branches(nn.Module):
    """A branch is used by one rank at a time, the last by none."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.trunk = mlp()
        generator = torch.Generator().manual_seed(5)
        scales = torch.randn(ranks + 1, 3, generator=generator, dtype=torch.float64)
        self.branches = nn.ParameterList(scales.unbind())

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.trunk(inputs) * self.branches[branch]


def unused(me: Rank, settings: dict, moves: bool) -> None:
    model, reference = DDP(Branches(me.size), **settings), Branches(me.size)
    ours, theirs = sgd(model), sgd(reference)

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        branch = (rank + step * moves) % me.size
        return (module(inputs, branch) - targets).square().mean()

    for step in range(4):
        ours.zero_grad(), theirs.zero_grad()
        loss(model, me.rank, step).backward()
        for rank in range(me.size):
            (loss(reference, rank, step) / me.size).backward()
        ours.step(), theirs.step()
        assert_same(model, reference)
    if "find_unused_parameters" in settings:
        assert model.module.branches[-1].grad is None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({"find_unused_parameters": True}, True),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True, **SMALL}, True),
        ({"static_graph": True}, False),
    ],
)
def test_unused_parameters(settings, moves, size, tmp_path):
    run(unused, size, tmp_path, settings, moves)


class Buffered(nn.Module):
    """Has buffers of four dtypes, each of which a forward changes differently on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = mlp().insert(1, nn.BatchNorm1d(11, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor([rank, 7]))
        self.register_buffer("odd", torch.tensor([rank % 2 == 1]))
        self.register_buffer("mean", torch.tensor([rank / 7], dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += (inputs[0, 0] * 100).long()
        self.odd.logical_xor_(inputs[0, 1] > 0)
        self.mean += inputs[0, 2]
        return self.net(inputs)


def buffers(me: Rank, broadcast: bool) -> None:
    """Each forward starts from the buffers of rank 0, or without broadcasts, from its own."""
    model, reference = DDP(Buffered(me.rank), broadcast_buffers=broadcast), Buffered(0)
    optimizer, theirs = sgd(model), sgd(reference)
    kept = [list(Buffered(rank).buffers()) for rank in range(me.size)]
    for step in range(4):
        optimizer.zero_grad(), theirs.zero_grad()
        loss_of(model, me.rank, step).backward()
        optimizer.step()
        start = [kept[0 if broadcast else rank] for rank in range(me.size)]
        for rank in range(me.size):
            for buffer, value in zip(reference.buffers(), start[rank], strict=True):
                buffer.copy_(value)
            (loss_of(reference, rank, step) / me.size).backward()
            kept[rank] = [b.clone() for b in reference.buffers()]
        theirs.step()
        assert_same(model, reference)
        for (name, ours), expected in zip(model.named_buffers(), kept[me.rank], strict=True):
            torch.testing.assert_close(ours, expected, msg=lambda text, name=name: f"{name} {text}")


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers(broadcast, tmp_path):
    run(buffers, 3, tmp_path, broadcast)
