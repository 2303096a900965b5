"""The contract as a table: the other names and forms that trainers call collectives by.

Lists, coalesced and functional ones, those that autograd goes through, and point-to-point ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from _ranks import Rank, run
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

SIZE = 4
COUNT = 6


def values(rank: int, key: int = 0, count: int = COUNT) -> torch.Tensor:
    """What a rank has, which all ranks can make."""
    generator = torch.Generator().manual_seed(hash((rank, key, count)))
    return torch.randn(count, generator=generator, dtype=torch.float64)


def everyones(key: int = 0, count: int = COUNT) -> torch.Tensor:
    return torch.stack([values(rank, key, count) for rank in range(SIZE)])


def nothing(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float64)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


# --- Lists and old names


def old_names(me: Rank) -> None:
    gathered, scattered = nothing(SIZE * COUNT), nothing(COUNT)
    dist._all_gather_base(gathered, values(me.rank))
    assert_close(gathered, everyones().flatten())
    dist._reduce_scatter_base(scattered, values(me.rank, count=SIZE * COUNT))
    assert_close(scattered, everyones(count=SIZE * COUNT).sum(0).chunk(SIZE)[me.rank])


def lists(me: Rank) -> None:
    gathered = [nothing(COUNT) for _ in range(SIZE)]
    dist.all_gather(gathered, values(me.rank))
    assert_close(torch.stack(gathered), everyones())
    gathered = [nothing(COUNT) for _ in range(SIZE)] if me.rank == 1 else None
    dist.gather(values(me.rank), gathered, dst=1)
    if me.rank == 1:
        assert_close(torch.stack(gathered), everyones())
    sent = [values(2, key) for key in range(SIZE)] if me.rank == 2 else None
    received = nothing(COUNT)
    dist.scatter(received, sent, src=2)
    assert_close(received, values(2, me.rank))
    dist.reduce_scatter(received, [values(me.rank, key) for key in range(SIZE)])
    assert_close(received, everyones(me.rank).sum(0))
    exchanged = [nothing(COUNT) for _ in range(SIZE)]
    dist.all_to_all(exchanged, [values(me.rank, key) for key in range(SIZE)])
    assert_close(torch.stack(exchanged), torch.stack([values(r, me.rank) for r in range(SIZE)]))
    reduced = values(me.rank)
    dist.reduce(reduced, dst=3, op=dist.ReduceOp.MAX)
    if me.rank == 3:
        assert_close(reduced, everyones().amax(0))


def uneven(me: Rank) -> None:
    """As tokens go to experts: each rank sends another count to each rank."""
    counts = [[(rank + 2 * to) % 5 for to in range(SIZE)] for rank in range(SIZE)]
    parts = [[values(rank, to, counts[rank][to]) for to in range(SIZE)] for rank in range(SIZE)]
    expected = torch.cat([parts[rank][me.rank] for rank in range(SIZE)])
    received = nothing(len(expected))
    here = [row[me.rank] for row in counts]
    sent = torch.cat(parts[me.rank])
    dist.all_to_all_single(received, sent, here, counts[me.rank])
    assert_close(received, expected)
    exchanged = functional.all_to_all_single(sent, here, counts[me.rank], dist.group.WORLD)
    assert_close(exchanged + 0, expected)
    gathered = [nothing(3 + rank) for rank in range(SIZE)]
    dist.all_gather(gathered, values(me.rank, count=3 + me.rank))
    for rank in range(SIZE):
        assert_close(gathered[rank], values(rank, count=3 + rank))


# --- Coalesced


def coalesced(me: Rank) -> None:
    tensors = [values(me.rank, key, 3 + key) for key in range(3)]
    dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.SUM)
    for key in range(3):
        assert_close(tensors[key], everyones(key, 3 + key).sum(0))
    lists = [[nothing(3 + key) for key in range(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [values(me.rank, key, 3 + key) for key in range(3)])
    for rank in range(SIZE):
        for key in range(3):
            assert_close(lists[rank][key], values(rank, key, 3 + key))


def coalescing(me: Rank) -> None:
    """Calls within a block become one, with one thing to wait for."""
    for is_async in (False, True):
        tensors = [values(me.rank, key, 3 + key) for key in range(3)]
        with _coalescing_manager(async_ops=is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        if is_async:
            manager.wait()
        for key in range(3):
            assert_close(tensors[key], everyones(key, 3 + key).mean(0))

        outputs = [nothing(SIZE * (3 + key)) for key in range(3)]
        with _coalescing_manager(async_ops=is_async) as manager:
            for key in range(3):
                dist.all_gather_into_tensor(outputs[key], values(me.rank, key, 3 + key))
        if is_async:
            manager.wait()
        for key in range(3):
            assert_close(outputs[key], everyones(key, 3 + key).flatten())

        outputs = [nothing(3 + key) for key in range(3)]
        with _coalescing_manager(async_ops=is_async) as manager:
            for key in range(3):
                dist.reduce_scatter_tensor(
                    outputs[key], values(me.rank, key, SIZE * (3 + key)), op=dist.ReduceOp.AVG
                )
        if is_async:
            manager.wait()
        for key in range(3):
            expected = everyones(key, SIZE * (3 + key)).mean(0)
            assert_close(outputs[key], expected.chunk(SIZE)[me.rank])


def functional_ones(me: Rank) -> None:
    group = dist.group.WORLD
    everything = everyones(count=8)
    mine = everything[me.rank]
    mesh = init_device_mesh("cpu", (2, 2))
    assert_close(functional.all_reduce(mine, "avg", group) + 0, everything.mean(0))
    row = everything.view(2, 2, -1)[me.rank // 2]
    assert_close(functional.all_reduce(mine, dist.ReduceOp.AVG.name, (mesh, 1)) + 0, row.mean(0))
    for ours, key in zip(
        functional.all_reduce_coalesced([values(me.rank, k) for k in (1, 2)], "max", group),
        (1, 2),
        strict=True,
    ):
        assert_close(ours + 0, everyones(key).amax(0))
    gathered = functional.all_gather_tensor(mine.view(2, 4), 1, group)
    assert_close(gathered + 0, everything.view(SIZE, 2, 4).transpose(0, 1).flatten(1))
    scattered = functional.reduce_scatter_tensor(mine.view(2, 4), "sum", 1, group)
    assert_close(scattered + 0, everything.sum(0).view(2, 4)[:, me.rank : me.rank + 1])
    assert_close(functional.broadcast(mine, 2, group) + 0, everything[2])
    to = [(rank + 1) % SIZE for rank in range(SIZE)]
    permuted = functional.permute_tensor(mine, to, group)
    assert_close(permuted + 0, everything[(me.rank - 1) % SIZE])


# --- Point-to-point


def batches(me: Rank) -> None:
    """A pair of messages each way with both neighbours, in one batch."""
    right, left = (me.rank + 1) % SIZE, (me.rank - 1) % SIZE
    received = {(peer, key): nothing(COUNT + key) for peer in (left, right) for key in (0, 1)}
    ops = []
    for (peer, key), tensor in received.items():
        ops.append(dist.P2POp(dist.isend, values(me.rank, 10 * peer + key, COUNT + key), peer))
        ops.append(dist.P2POp(dist.irecv, tensor, peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for (peer, key), tensor in received.items():
        assert_close(tensor, values(peer, 10 * me.rank + key, COUNT + key))


def any_source(me: Rank) -> None:
    if me.rank == 0:
        sources = set()
        for _ in range(SIZE - 1):
            received = nothing(COUNT)
            source = dist.recv(received)
            assert_close(received, values(source))
            sources.add(source)
        assert sources == {1, 2, 3}
        received = nothing(COUNT)
        work = dist.irecv(received, tag=7)
        work.wait()
        assert_close(received, values(work._source_rank(), 7))
        assert work._source_rank() == 3
    else:
        dist.send(values(me.rank), 0)
        if me.rank == 3:
            dist.isend(values(3, 7), 0, tag=7).wait()


# --- Through autograd


def check_gradient(
    me: Rank,
    function: Callable[[torch.Tensor], torch.Tensor | Sequence[torch.Tensor]],
    reference: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """The reference makes each rank's output of all inputs; the loss is a sum over all ranks."""
    mine = everyones()[me.rank].clone().requires_grad_()
    output = function(mine)
    if not isinstance(output, torch.Tensor):
        output = torch.stack([*output])
    (output.flatten() * values(me.rank, 50, output.numel())).sum().backward()

    inputs = everyones().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(SIZE):
        expected = reference(inputs, rank)
        loss = loss + (expected.flatten() * values(rank, 50, expected.numel())).sum()
        if rank == me.rank:
            assert_close(output.detach().flatten(), expected.detach().flatten())
    loss.backward()
    assert_close(mine.grad, inputs.grad[me.rank])


def thirds(x: torch.Tensor) -> list[torch.Tensor]:
    """Overlapping parts, one for each rank."""
    return [x[rank : rank + 3] for rank in range(SIZE)]


DIFFERENTIABLE: dict[str, tuple[Callable, Callable]] = {
    "all_reduce": (differentiable.all_reduce, lambda x, rank: x.sum(0)),
    "all_gather": (differentiable.all_gather, lambda x, rank: x),
    "reduce_scatter": (
        lambda x: differentiable.reduce_scatter(nothing(3), thirds(x)),
        lambda x, rank: x[:, rank : rank + 3].sum(0),
    ),
    "all_to_all": (
        lambda x: differentiable.all_to_all([nothing(3) for _ in range(SIZE)], thirds(x)),
        lambda x, rank: x[:, rank : rank + 3],
    ),
    "all_to_all_single": (
        lambda x: differentiable.all_to_all_single(nothing(3 * SIZE), torch.cat(thirds(x))),
        lambda x, rank: x[:, rank : rank + 3],
    ),
    "broadcast": (lambda x: differentiable.broadcast(x, 1), lambda x, rank: x[1]),
    # What others than the root have is nobody's business.
    "reduce": (
        lambda x: differentiable.reduce(x, 2) * (dist.get_rank() == 2),
        lambda x, rank: x.sum(0) * (rank == 2),
    ),
    "gather": (
        lambda x: torch.stack(differentiable.gather(x, 1)) * (dist.get_rank() == 1),
        lambda x, rank: x * (rank == 1),
    ),
    "scatter": (
        lambda x: differentiable.scatter(thirds(x), 3),
        lambda x, rank: x[3][rank : rank + 3],
    ),
    "all_gather_tensor_autograd": (
        lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
        lambda x, rank: x,
    ),
    "reduce_scatter_tensor_autograd": (
        lambda x: functional.reduce_scatter_tensor_autograd(
            torch.cat(thirds(x)), "sum", 0, dist.group.WORLD
        ),
        lambda x, rank: x[:, rank : rank + 3].sum(0),
    ),
    "all_to_all_single_autograd": (
        lambda x: functional.all_to_all_single_autograd(
            torch.cat(thirds(x)), None, None, dist.group.WORLD
        ),
        lambda x, rank: x[:, rank : rank + 3],
    ),
}


def gradients(me: Rank) -> None:
    for name, (function, reference) in DIFFERENTIABLE.items():
        try:
            check_gradient(me, function, reference)
        except Exception as error:
            error.add_note(f"in {name}")
            raise


def every(me: Rank, functions: list[Callable[[Rank], None]]) -> None:
    for function in functions:
        function(me)


@pytest.mark.parametrize(
    "functions",
    [
        [old_names, lists, uneven],
        [coalesced, coalescing, functional_ones],
        [batches, any_source],
        [gradients],
    ],
    ids=["lists", "coalesced", "point to point", "autograd"],
)
def test_collectives(functions, tmp_path):
    run(every, SIZE, tmp_path, functions)
