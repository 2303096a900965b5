"""Point-to-point: order, tags, any source, and batches."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, repeat, run
from torch.distributed.distributed_c10d import _coalescing_manager

import torch_gpumode.distributed as gd


def ring(me: Rank) -> None:
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for count in (0, 1, 5, 2_000_003):
        sent = torch.arange(count, dtype=torch.float32) + me.rank
        received = torch.full((count,), float("nan"))
        work = dist.isend(sent, right)
        dist.recv(received, left)
        work.wait()
        assert torch.equal(received, torch.arange(count, dtype=torch.float32) + left)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring(size, tmp_path):
    run(ring, size, tmp_path)


def everybody_sends_first(me: Rank) -> None:
    """More than any buffer holds, in both directions at once."""
    peer = 1 - me.rank
    sent = torch.full((5_000_000,), float(me.rank))
    received = torch.empty_like(sent)
    works = [dist.isend(sent, peer), dist.irecv(received, peer)]
    for work in works:
        work.wait()
    assert (received == peer).all()


def test_exchange_of_large_messages(tmp_path):
    run(everybody_sends_first, 2, tmp_path)


def tags(me: Rank) -> None:
    if me.rank == 0:
        works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in (7, 8, 9)]
        for work in works:
            work.wait()
    else:
        for tag in (9, 7, 8):
            received = torch.empty(3)
            dist.recv(received, 0, tag=tag)
            assert (received == tag).all()


def order_within_a_tag(me: Rank) -> None:
    if me.rank == 0:
        for value in range(50):
            dist.send(torch.tensor([value]), 1)
    else:
        received = [torch.empty(1, dtype=torch.int64) for _ in range(50)]
        works = [dist.irecv(each, 0) for each in received]
        for work in works:
            work.wait()
        assert torch.cat(received).tolist() == list(range(50))


@pytest.mark.parametrize("function", [tags, order_within_a_tag])
def test_matching(function, tmp_path):
    run(function, 2, tmp_path)


def any_source(me: Rank) -> None:
    if me.rank == 0:
        sources = []
        for _ in range(me.size - 1):
            received = torch.empty(1, dtype=torch.int64)
            source = dist.recv(received)
            assert received.item() == source
            sources.append(source)
        assert sorted(sources) == list(range(1, me.size))
        received = torch.empty(1, dtype=torch.int64)
        work = dist.group.WORLD.recv_anysource([received], 5)
        work.wait()
        assert work._source_rank() == received.item() == me.size - 1
    else:
        dist.send(torch.tensor([me.rank]), 0)
        if me.rank == me.size - 1:
            dist.send(torch.tensor([me.rank]), 0, tag=5)


def test_any_source(tmp_path):
    run(any_source, 4, tmp_path)


def batches(me: Rank) -> None:
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for step in range(20):
        sent, received = torch.full((100,), me.rank + 0.5 * step), torch.empty(100)
        ops = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, sent, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (received == left + 0.5 * step).all()


@pytest.mark.parametrize("size", [2, 3])
def test_batches(size, tmp_path):
    run(batches, size, tmp_path)


def to_oneself(me: Rank) -> None:
    """Within a batch, as torch's pipelines do up to 2.12; torch's own functions may refuse it."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    peer = 1 - me.rank
    for numel in (0, 5, 100_000):
        sent = [torch.randn(numel) for _ in range(2)]
        received = [torch.full((numel,), torch.nan) for _ in range(2)]
        from_peer = torch.full((3,), torch.nan)
        backend._start_coalescing()
        backend.recv([from_peer], peer, 0)
        backend.send([sent[0]], me.rank, 0)
        backend.send([torch.full((3,), float(me.rank))], peer, 0)
        backend.send([sent[1]], me.rank, 7)
        backend.recv([received[1]], me.rank, 7)
        backend.recv([received[0]], me.rank, 0)
        backend._end_coalescing().wait()
        assert from_peer.tolist() == [float(peer)] * 3
        for ours, theirs in zip(received, sent, strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"dst: a rank can send to itself only in a batch"):
        backend.send([torch.randn(3)], me.rank, 0)
    with pytest.raises(ValueError, match=r"src: a rank can receive from itself only in a batch"):
        backend.recv([torch.empty(3)], me.rank, 0)
    dist.barrier()
    backend._start_coalescing()
    backend.send([torch.randn(3)], me.rank, 0)
    backend.recv([torch.empty(4)], me.rank, 0)
    with pytest.raises(gd.CollectiveMismatch, match=f"rank {me.rank} sends 3 elements"):
        backend._end_coalescing().wait()


def test_to_oneself(tmp_path):
    run(to_oneself, 2, tmp_path)


def broken_batch(me: Rank) -> None:
    """A mistake within a batch is raised at its end, where torch forgets the batch."""
    peer = 1 - me.rank
    refused = torch.ones(4, 4)[:, :2]
    ops = [dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.isend, refused, peer)]
    with pytest.raises(ValueError, match=r"tensors: .*contiguous"):
        dist.batch_isend_irecv(ops)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    received = torch.empty(2)
    ops = [
        dist.P2POp(dist.irecv, received, peer),
        dist.P2POp(dist.isend, torch.full((2,), float(me.rank)), peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [float(peer)] * 2


def test_broken_batch(tmp_path):
    run(broken_batch, 2, tmp_path)


def broken_block(me: Rank) -> None:
    """Somebody else's exception in a block: torch keeps the block open, a rebuild ends it."""

    def fail_in_block() -> None:
        with _coalescing_manager(device=torch.device("cpu")):
            dist.group.WORLD.send([torch.ones(2)], 1 - me.rank, 0)
            raise KeyError("the user's")

    with pytest.raises(KeyError):
        fail_in_block()
    gd.rebuild(timeout=timedelta(seconds=20))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def test_broken_block(tmp_path):
    run(broken_block, 2, tmp_path)


def abort_in_batches(me: Rank) -> None:
    """Another thread aborts while batches are made: nothing but our exceptions comes of it."""
    peer = 1 - me.rank
    stop = threading.Event()

    def keep_aborting() -> None:
        while not stop.is_set():
            gd.abort()

    def exchange() -> None:
        ops = [
            dist.P2POp(dist.irecv, torch.empty(2), peer),
            dist.P2POp(dist.isend, torch.ones(2), peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for _ in range(20):
        thread = threading.Thread(target=keep_aborting)
        thread.start()
        with pytest.raises(gd.CollectiveAborted):
            repeat(exchange)
        for _ in range(20):
            with pytest.raises(gd.CollectiveAborted):
                exchange()
        stop.set()
        thread.join()
        stop.clear()
        gd.rebuild(timeout=timedelta(seconds=20))


def test_abort_in_batches(tmp_path):
    run(abort_in_batches, 2, tmp_path)


def beside_collectives(me: Rank) -> None:
    """A receive that waits does not hold up collectives."""
    received = torch.empty(1)
    work = dist.irecv(received, 1) if me.rank == 0 else None
    for _ in range(10):
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert (tensor == me.size).all()
    if me.rank == 1:
        dist.send(torch.tensor([3.0]), 0)
    if work is not None:
        work.wait()
        assert received.item() == 3


def test_beside_collectives(tmp_path):
    run(beside_collectives, 2, tmp_path)


def objects(me: Rank) -> None:
    if me.rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    else:
        box = [None, None]
        dist.recv_object_list(box, 0)
        assert box == [{"a": 1}, "b"]


def test_objects(tmp_path):
    run(objects, 2, tmp_path)
