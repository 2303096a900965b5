"""Every collective against its definition in float64, on fresh random data, outputs poisoned."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _ranks import Rank, run
from _values import (
    MOVABLE,
    OPS,
    assert_reduced,
    digest,
    poisoned,
    random_tensor,
    reductions,
    same_bits,
)

COUNTS = [0, 1, 4, 1003]
LARGE = 3_000_017  # more than what is staged at once, and odd

LARGE_REDUCTIONS = [("sum", torch.float32), ("avg", torch.bfloat16), ("max", torch.int8)]

SIZES = [1, 2, 3, 4]


def all_reduce_everything(me: Rank) -> str:
    results = []
    for (op, dtype), count in itertools.product(reductions(), [*COUNTS, LARGE]):
        if count == LARGE and (op, dtype) not in LARGE_REDUCTIONS:
            continue
        inputs = [random_tensor(count, dtype, rank, 1) for rank in range(me.size)]
        tensor = inputs[me.rank].clone()
        dist.all_reduce(tensor, OPS[op][0]())
        assert_reduced(tensor, inputs, op, f"all_reduce {op} {dtype} {count}")
        results.append(tensor)
    return digest(results)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(size, tmp_path):
    digests = run(all_reduce_everything, size, tmp_path, limit_s=120)
    assert len(set(digests)) == 1, "the results are not bit-identical on all ranks"


def reduce_everything(me: Rank) -> None:
    for (op, dtype), count in itertools.product(reductions(), [0, 1, 1003]):
        for root in range(me.size):
            inputs = [random_tensor(count, dtype, rank, 2) for rank in range(me.size)]
            tensor = inputs[me.rank].clone()
            dist.reduce(tensor, root, OPS[op][0]())
            if me.rank == root:
                assert_reduced(tensor, inputs, op, f"reduce {op} {dtype} {count} to {root}")
            else:
                assert same_bits(tensor, inputs[me.rank]), "changed on a rank that is not dst"


@pytest.mark.parametrize("size", SIZES)
def test_reduce(size, tmp_path):
    run(reduce_everything, size, tmp_path)


def reduce_scatter_everything(me: Rank) -> None:
    for (op, dtype), count in itertools.product(reductions(), [0, 1, 4, 1003]):
        inputs = [random_tensor(count * me.size, dtype, rank, 3) for rank in range(me.size)]
        mine = [x[me.rank * count : (me.rank + 1) * count] for x in inputs]
        output = poisoned(count, dtype)
        dist.reduce_scatter_tensor(output, inputs[me.rank], OPS[op][0]())
        assert_reduced(output, mine, op, f"reduce_scatter_tensor {op} {dtype} {count}")

        output = poisoned(count, dtype)
        chunks = [chunk.clone() for chunk in inputs[me.rank].split(count)] if count else None
        dist.reduce_scatter(
            output, chunks or [output.clone() for _ in range(me.size)], OPS[op][0]()
        )
        assert_reduced(output, mine, op, f"reduce_scatter {op} {dtype} {count}")


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(size, tmp_path):
    run(reduce_scatter_everything, size, tmp_path)


def reduce_scatter_in_place(me: Rank) -> None:
    for count in (5, LARGE // me.size):
        inputs = [random_tensor(count * me.size, torch.float32, rank, 4) for rank in range(me.size)]
        whole = inputs[me.rank].clone()
        mine = whole[me.rank * count : (me.rank + 1) * count]
        dist.reduce_scatter_tensor(mine, whole)
        expected = [x[me.rank * count : (me.rank + 1) * count] for x in inputs]
        assert_reduced(mine, expected, "sum", f"in place, {count}")


def all_gather_in_place(me: Rank) -> None:
    for count in (5, LARGE // me.size):
        inputs = [random_tensor(count, torch.float32, rank, 5) for rank in range(me.size)]
        whole = poisoned(count * me.size, torch.float32)
        mine = whole[me.rank * count : (me.rank + 1) * count]
        mine.copy_(inputs[me.rank])
        dist.all_gather_into_tensor(whole, mine)
        assert same_bits(whole, torch.cat(inputs))


@pytest.mark.parametrize("function", [reduce_scatter_in_place, all_gather_in_place])
def test_in_place(function, tmp_path):
    run(function, 3, tmp_path)


def reduce_scatter_uneven(me: Rank) -> None:
    counts = [3 * rank + 1 for rank in range(me.size)]
    inputs = [random_tensor(sum(counts), torch.float32, rank, 6) for rank in range(me.size)]
    output = poisoned(counts[me.rank], torch.float32)
    dist.reduce_scatter(output, list(inputs[me.rank].split(counts)))
    assert_reduced(output, [x.split(counts)[me.rank] for x in inputs], "sum", "uneven")


def test_reduce_scatter_uneven(tmp_path):
    run(reduce_scatter_uneven, 3, tmp_path)


def move_everything(me: Rank) -> None:
    for dtype, count in itertools.product(MOVABLE, COUNTS):
        what = f"{dtype} {count}"
        inputs = [random_tensor(count, dtype, rank, 7) for rank in range(me.size)]
        mine = inputs[me.rank]

        for root in range(me.size):
            tensor = mine.clone() if me.rank == root else poisoned(count, dtype)
            dist.broadcast(tensor, root)
            assert same_bits(tensor, inputs[root]), f"broadcast {what} from {root}"

        output = poisoned(count * me.size, dtype)
        dist.all_gather_into_tensor(output, mine)
        assert same_bits(output, torch.cat(inputs)), f"all_gather_into_tensor {what}"

        outputs = [poisoned(count, dtype) for _ in inputs]
        dist.all_gather(outputs, mine)
        assert all(map(same_bits, outputs, inputs)), f"all_gather {what}"

        root = me.size - 1
        outputs = [poisoned(count, dtype) for _ in inputs]
        dist.gather(mine, outputs if me.rank == root else None, root)
        if me.rank == root:
            assert all(map(same_bits, outputs, inputs)), f"gather {what}"

        tensor = poisoned(count, dtype)
        dist.scatter(tensor, inputs if me.rank == root else None, root)
        assert same_bits(tensor, mine), f"scatter {what}"

        # Rank r sends s the tensor of key (r, s).
        pairs = [
            [random_tensor(count, dtype, r, s, 8) for s in range(me.size)] for r in range(me.size)
        ]
        expected = [pairs[r][me.rank] for r in range(me.size)]
        outputs = [poisoned(count, dtype) for _ in inputs]
        dist.all_to_all(outputs, pairs[me.rank])
        assert all(map(same_bits, outputs, expected)), f"all_to_all {what}"

        output = poisoned(count * me.size, dtype)
        dist.all_to_all_single(output, torch.cat(pairs[me.rank]))
        assert same_bits(output, torch.cat(expected)), f"all_to_all_single {what}"


@pytest.mark.parametrize("size", SIZES)
def test_moves(size, tmp_path):
    run(move_everything, size, tmp_path)


def move_large(me: Rank) -> None:
    inputs = [random_tensor(LARGE, torch.int32, rank, 9) for rank in range(me.size)]
    mine = inputs[me.rank]
    tensor = mine.clone() if me.rank == 1 else poisoned(LARGE, torch.int32)
    dist.broadcast(tensor, 1)
    assert same_bits(tensor, inputs[1])
    outputs = [poisoned(LARGE, torch.int32) for _ in inputs]
    dist.all_gather(outputs, mine)
    assert all(map(same_bits, outputs, inputs))
    dist.gather(mine, outputs if me.rank == 0 else None, 0)
    tensor = poisoned(LARGE, torch.int32)
    dist.scatter(tensor, inputs if me.rank == 0 else None, 0)
    assert same_bits(tensor, mine)
    output = poisoned(LARGE // me.size * me.size, torch.int32)
    dist.all_to_all_single(output, mine[: len(output)].clone())
    piece = LARGE // me.size
    expected = [x[me.rank * piece : (me.rank + 1) * piece] for x in inputs]
    assert same_bits(output, torch.cat(expected))


def test_moves_large(tmp_path):
    run(move_large, 3, tmp_path)


def uneven_gather_and_all_to_all(me: Rank) -> None:
    counts = [0, 5, 1, 1003][: me.size]
    inputs = [random_tensor(count, torch.float32, rank, 10) for rank, count in enumerate(counts)]
    outputs = [poisoned(count, torch.float32) for count in counts]
    dist.all_gather(outputs, inputs[me.rank])
    assert all(map(same_bits, outputs, inputs))

    # Rank r sends s (r + 2 s) % 5 rows of 3.
    rows = [[(r + 2 * s) % 5 for s in range(me.size)] for r in range(me.size)]
    sent = [
        random_tensor(3 * sum(rows[r]), torch.float64, r, 11).view(-1, 3) for r in range(me.size)
    ]
    received_rows = [rows[r][me.rank] for r in range(me.size)]
    output = poisoned(3 * sum(received_rows), torch.float64).view(-1, 3)
    dist.all_to_all_single(output, sent[me.rank], received_rows, rows[me.rank])
    expected = [sent[r].split(rows[r])[me.rank] for r in range(me.size)]
    assert same_bits(output, torch.cat(expected))

    outputs = [poisoned(3 * n, torch.float64).view(-1, 3) for n in received_rows]
    dist.all_to_all(outputs, list(sent[me.rank].split(rows[me.rank])))
    assert all(map(same_bits, outputs, expected))


@pytest.mark.parametrize("size", SIZES)
def test_uneven(size, tmp_path):
    run(uneven_gather_and_all_to_all, size, tmp_path)


def coalesced_virtuals(me: Rank) -> None:
    """The ones that functional collectives always use."""
    counts = [3, 0, 1001]
    world = dist.group.WORLD
    inputs = [[random_tensor(n, torch.float32, r, 12) for n in counts] for r in range(me.size)]

    tensors = [x.clone() for x in inputs[me.rank]]
    world.allreduce_coalesced(tensors).wait()
    for i, tensor in enumerate(tensors):
        assert_reduced(tensor, [x[i] for x in inputs], "sum", "allreduce_coalesced")

    outputs = [poisoned(n * me.size, torch.float32) for n in counts]
    world.allgather_into_tensor_coalesced(outputs, inputs[me.rank]).wait()
    for i, output in enumerate(outputs):
        assert same_bits(output, torch.cat([x[i] for x in inputs]))

    wide = [
        [random_tensor(n * me.size, torch.float32, r, 13) for n in counts] for r in range(me.size)
    ]
    outputs = [poisoned(n, torch.float32) for n in counts]
    world.reduce_scatter_tensor_coalesced(outputs, wide[me.rank]).wait()
    for i, n in enumerate(counts):
        mine = [x[i][me.rank * n : (me.rank + 1) * n] for x in wide]
        assert_reduced(outputs[i], mine, "sum", "reduce_scatter_tensor_coalesced")


def functional_collectives(me: Rank) -> None:
    inputs = [random_tensor(8 * me.size, torch.float32, rank, 14) for rank in range(me.size)]
    mine = inputs[me.rank]
    world = dist.group.WORLD
    assert_reduced(funcol.all_reduce(mine, "sum", world) + 0, inputs, "sum", "funcol")
    gathered = funcol.all_gather_tensor(mine, 0, world) + 0
    assert same_bits(gathered, torch.cat(inputs))
    scattered = funcol.reduce_scatter_tensor(mine, "avg", 0, world) + 0
    expected = [x[me.rank * 8 : (me.rank + 1) * 8] for x in inputs]
    assert_reduced(scattered, expected, "avg", "funcol")
    exchanged = funcol.all_to_all_single(mine, None, None, world) + 0
    assert same_bits(exchanged, torch.cat(expected))


def object_collectives(me: Rank) -> None:
    gathered = [None] * me.size
    dist.all_gather_object(gathered, {"rank": me.rank, "text": "x" * me.rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(me.size)]
    box = [me.rank, "left alone"] if me.rank == 0 else [None, None]
    dist.broadcast_object_list(box, 0)
    assert box == [0, "left alone"]


@pytest.mark.parametrize(
    "function", [coalesced_virtuals, functional_collectives, object_collectives]
)
@pytest.mark.parametrize("size", [1, 3])
def test_other_ways_in(function, size, tmp_path):
    run(function, size, tmp_path)


def orders_in_memory(me: Rank) -> None:
    """Elements may lie in any order, if it is the same on all ranks."""
    for permute in (
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x.transpose(0, 1),
    ):
        inputs = [permute(random_tensor(120, torch.float32, r, 9).view(2, 3, 4, 5)) for r in (0, 1)]
        assert not inputs[0].is_contiguous()
        mine, other = inputs[me.rank], inputs[1 - me.rank]
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, inputs[0] + inputs[1])
        copied = mine.clone()
        dist.broadcast(copied, 1)
        assert torch.equal(copied, inputs[1])
        gathered = [torch.empty_like(x) for x in inputs]
        dist.all_gather(gathered, mine)
        assert all(torch.equal(x, y) for x, y in zip(gathered, inputs, strict=True))
        received = torch.empty_like(other)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, 1 - me.rank),
                dist.P2POp(dist.irecv, received, 1 - me.rank),
            ]
        ):
            work.wait()
        assert torch.equal(received, other)


def test_orders_in_memory(tmp_path):
    run(orders_in_memory, 2, tmp_path)


def barriers(me: Rank) -> None:
    import time

    for _ in range(20):
        dist.barrier()
    if me.rank == 1:
        time.sleep(0.3)
    began = time.monotonic()
    dist.barrier()
    if me.rank != 1:
        assert time.monotonic() - began > 0.2, "left the barrier before rank 1 came"


def test_barrier(tmp_path):
    run(barriers, 3, tmp_path)


def more_than_two_to_the_31(me: Rank) -> None:
    count = 2**31 + 3
    tensor = torch.zeros(count, dtype=torch.uint8)
    if me.rank == 0:
        tensor[-1], tensor[2**31], tensor[0] = 1, 2, 3
    dist.broadcast(tensor, 0)
    assert (tensor[-1], tensor[2**31], tensor[0], tensor[2**31 - 1]) == (1, 2, 3, 0)


def test_more_than_two_to_the_31_elements(tmp_path):
    run(more_than_two_to_the_31, 2, tmp_path)
