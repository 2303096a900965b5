"""Retried collectives where nobody is lost: values, and what becomes of mistakes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, check_group, run
from _values import memory_of, poisoned, random_tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

import torch_gpumode.distributed as gd
from torch_gpumode.distributed import Outcome, _retry

REDUCIBLE = [torch.int64, torch.float32, torch.bfloat16, torch.complex64]
MOVABLE = [torch.int64, torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64]
SUM, AVG = ReduceOp.SUM, ReduceOp.AVG
LARGE = 300_007  # more than 1 MiB of float32


class Setting(NamedTuple):
    """Where a collective is called, and on what."""

    rank: int
    size: int
    count: int = 1003
    dtype: torch.dtype = torch.float32
    group: dist.ProcessGroup | None = None

    def data(self, to: int = 0, more: int = 0) -> torch.Tensor:
        return random_tensor(self.count + more, self.dtype, self.rank, to).clone()

    def empty(self, more: int = 0) -> torch.Tensor:
        return poisoned(self.count + more, self.dtype)

    def pieces(self, more: Callable[[int], int] = lambda to: 0) -> list[torch.Tensor]:
        return [self.data(to, more(to)) for to in range(self.size)]

    def holes(self, more: Callable[[int], int] = lambda to: 0) -> list[torch.Tensor]:
        return [self.empty(more(rank)) for rank in range(self.size)]

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.rank * self.count : (self.rank + 1) * self.count]

    def at_root(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return tensors if self.rank == self.root else None

    @property
    def root(self) -> int:
        return self.count % self.size

    @property
    def global_root(self) -> int:
        return dist.get_global_rank(self.group or dist.group.WORLD, self.root)


class Call:
    """A function by name, of torch's or of ours, and what it is given; a dict at last is kwargs."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
        self.args = args[:-1] if self.kwargs else args

    def run(self, lib: ModuleType, **kwargs: Any) -> Any:
        return getattr(lib, self.name)(*self.args, **self.kwargs, **kwargs)

    def memory(self) -> list[torch.Tensor]:
        return memory_of(self.args)


def _mixed(s: Setting) -> list[torch.Tensor]:
    return [s.data()[:0], s.data(1), s.data(2).view(1, -1, 1), s.data(3)[:1], s.data(4)]


def _gathered_in_place(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat(s.holes())
    return whole, s.mine(whole).copy_(s.data())


def _scattered_in_place(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat(s.pieces())
    return s.mine(whole), whole


def _exchanged(s: Setting) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The number of elements depends on both ends."""
    return s.holes(lambda rank: 2 * rank + s.rank), s.pieces(lambda to: 2 * s.rank + to)


def _exchanged_single(s: Setting) -> tuple[Any, ...]:
    both = _exchanged(s)
    return *map(torch.cat, both), *([len(each) for each in half] for half in both)


# The name of the function and the way in which it is called: its arguments.
CASES: dict[str, Callable[[Setting], tuple[Any, ...]]] = {
    "all_reduce": lambda s: (s.data(), SUM, s.group),
    "all_reduce avg": lambda s: (s.data(), AVG, s.group),
    "all_reduce of a view": lambda s: (s.data(more=12)[5:-7], {"group": s.group}),
    "all_reduce_coalesced": lambda s: (_mixed(s), AVG, s.group),
    "broadcast": lambda s: (s.data(), s.global_root, s.group),
    "broadcast by group rank": lambda s: (s.data(), {"group": s.group, "group_src": s.root}),
    "reduce": lambda s: (s.data(), s.global_root, AVG, s.group),
    "reduce by group rank": lambda s: (s.data(), {"group": s.group, "group_dst": s.root}),
    "all_gather": lambda s: (s.holes(lambda rank: rank), s.data(more=s.rank), s.group),
    "all_gather_into_tensor": lambda s: (torch.cat(s.holes()), s.data(), s.group),
    "all_gather_into_tensor in place": lambda s: (*_gathered_in_place(s), s.group),
    "gather": lambda s: (s.data(), s.at_root(s.holes()), s.global_root, s.group),
    "scatter": lambda s: (s.empty(), s.at_root(s.pieces()), s.global_root, s.group),
    "reduce_scatter": lambda s: (s.empty(s.rank), s.pieces(lambda to: to), SUM, s.group),
    "reduce_scatter_tensor": lambda s: (s.empty(), torch.cat(s.pieces()), SUM, s.group),
    "reduce_scatter_tensor in place": lambda s: (*_scattered_in_place(s), AVG, s.group),
    "all_to_all": lambda s: (*_exchanged(s), s.group),
    "all_to_all_single": lambda s: (*_exchanged_single(s), s.group),
    "barrier": lambda s: (s.group,),
}


def call_of(case: str, s: Setting) -> Call:
    return Call(case.split()[0], *CASES[case](s))


def test_every_function_has_a_case():
    functions = {name for name in gd.__all__ if hasattr(_retry, name)} - {"Outcome"}
    assert {name.split()[0] for name in CASES} == functions


def assert_same(call: Call, other: Call | list[torch.Tensor], what: str) -> None:
    expected = other.memory() if isinstance(other, Call) else other
    for i, (got, wanted) in enumerate(zip(call.memory(), expected, strict=True)):
        assert torch.equal(got, wanted), f"{what}, tensor {i}"


def compare(rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    """Asserts that ours do what torch's do, with and without a retry."""
    for case in CASES:
        dtypes = REDUCIBLE if "reduce" in case else MOVABLE
        for dtype, count in itertools.product(dtypes, [0, 1003, LARGE]):
            if count == LARGE and dtype != torch.float32:
                continue
            what, s = f"{case}, {dtype}, {count}", Setting(rank, size, count, dtype, group)
            theirs, ours, retried = (call_of(case, s) for _ in "123")
            theirs.run(dist)
            assert ours.run(gd, retry=False) == Outcome(tuple(range(size)), 1), what
            assert retried.run(gd) == Outcome(tuple(range(size)), 1), what
            assert_same(ours, theirs, f"without retry: {what}")
            assert_same(retried, theirs, what)


def in_the_world(me: Rank) -> None:
    compare(me.rank, me.size)


def in_a_group(me: Rank) -> None:
    """Whose ranks are not the global ones."""
    odd = dist.new_group([1, 3])
    if me.rank in (1, 3):
        compare(me.rank // 2, 2, odd)


@pytest.mark.parametrize(
    ("function", "size"), [(in_the_world, size) for size in (1, 2, 3, 4)] + [(in_a_group, 4)]
)
def test_values(function, size, tmp_path):
    run(function, size, tmp_path)


def refused(call: Call, error: type[Exception], message: str, what: str, **kwargs: Any) -> None:
    """Asserts that the call raises, and changes nothing."""
    before = [tensor.clone() for tensor in call.memory()]
    with pytest.raises(error, match=message):
        call.run(gd, **kwargs)
    assert_same(call, before, what)


def only_some_retry(me: Rank) -> None:
    for case, count in itertools.product(CASES, [1003, LARGE]):
        call = call_of(case, Setting(me.rank, me.size, count))
        retry = me.rank != count % me.size
        refused(call, gd.CollectiveMismatch, r"[(, ]retry\)", case, retry=retry)
        gd.rebuild()
    check_group(me.size)


def another_number(me: Rank) -> None:
    """One rank brings more than the others: nobody has changed anything, nor does it try again."""
    for count in (1003, LARGE):
        for name in ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce_scatter_tensor"):
            more = 1 if me.rank == me.size - 1 else 0
            call = call_of(name, Setting(me.rank, me.size, count + more))
            refused(call, gd.CollectiveMismatch, "elements", name)
            refused(call, gd.CollectiveMismatch, "elements", name)
            gd.rebuild()
            assert gd.barrier() == Outcome((0, 1, 2), 1)
    check_group(me.size)


def another_collective(me: Rank) -> None:
    call = call_of("all_reduce" if me.rank == 0 else "gather", Setting(me.rank, me.size))
    refused(call, gd.CollectiveMismatch, "all_reduce.*gather", "")


@pytest.mark.parametrize("function", [only_some_retry, another_number, another_collective])
def test_mismatch(function, tmp_path):
    run(function, 3, tmp_path)


def mistakes(me: Rank) -> None:
    world = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    mixed = dist.new_group(backend="cpu:gpumode,cuda:gloo")
    alone = dist.new_group([0])
    destroyed = dist.new_group()
    gd.barrier(destroyed)
    dist.destroy_process_group(destroyed)
    not_mine = alone if me.rank == 1 else dist.GroupMember.NON_GROUP_MEMBER
    sparse = torch.sparse_coo_tensor([[me.rank]], [1.5], (5,), check_invariants=True)
    s = Setting(me.rank, me.size)

    def check(error: type[Exception], message: str, call: Call, **kwargs: Any) -> None:
        refused(call, error, message, message, **kwargs)
        assert world.rank() == me.rank
        assert gd.all_reduce(s.data()) == Outcome((0, 1), 1), f"after {message}"
        check_group(2)

    for call in (call_of(case, s) for case in CASES):
        for number in (0, -1, 2.5, "2"):
            check(ValueError, "min_size: expected 1 or more", call, min_size=number)
        check(TypeError, "timeout: expected a timedelta, got 5", call, timeout=5)
        for timeout in (timedelta(0), timedelta(seconds=-1)):
            check(ValueError, "timeout: expected a positive one", call, timeout=timeout)
    for group, error, message in (
        (not_mine, ValueError, "group: expected a group that this rank is in"),
        ("x", ValueError, "group: expected a group"),
        (gloo, ValueError, "group: gloo has no gpumode backend"),
        (mixed, RuntimeError, "only gpumode can be rebuilt"),
        (destroyed, ValueError, "group: it has been destroyed"),
    ):
        check(error, message, call_of("all_reduce", s._replace(group=group)))
        check(error, message, call_of("barrier", s._replace(group=group)))
    check(ValueError, "retry: sparse", Call("all_reduce", {"tensor": sparse}))
    assert sparse.to_dense()[me.rank] == 1.5
    check(ValueError, "contiguous", Call("all_reduce", s.data()[::2]))
    check(ValueError, "src: expected a rank in", Call("broadcast", s.data(), 2))


def test_mistakes(tmp_path):
    run(mistakes, 2, tmp_path)


@contextmanager
def _by_hand() -> Iterator[None]:
    device = torch.device("cpu")
    dist.group.WORLD._start_coalescing(device)
    yield
    dist.group.WORLD._end_coalescing(device).wait()


BLOCKS = {
    "all in one call": _coalescing_manager,
    "op after op": lambda: _coalescing_manager(device=torch.device("cpu")),
    "by hand": _by_hand,
}


def in_a_block(me: Rank, block: str, first: bool) -> None:
    """It is refused, also as the first retried op of the group, and the others are coalesced."""
    s = Setting(me.rank, me.size)
    if not first:
        gd.barrier()
    retried = call_of("all_reduce", s)
    plain, expected = (call_of("all_reduce of a view", s) for _ in "12")
    with BLOCKS[block]():
        if block == "by hand":
            dist.group.WORLD.allreduce([plain.args[0]])
        else:
            plain.run(dist)
        refused(retried, ValueError, "coalesced", block)
    expected.run(dist)
    assert_same(plain, expected, block)
    assert retried.run(gd) == Outcome((0, 1), 1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_coalesced(block, first, tmp_path):
    run(in_a_block, 2, tmp_path, block, first)


def in_detail(me: Rank) -> None:
    """From torch 2.14 on a group lies before ours, which cannot be rebuilt."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    me.init()
    call = call_of("all_reduce", Setting(me.rank, me.size))
    if hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "wrapped_pg"):
        refused(call, RuntimeError, "TORCH_DISTRIBUTED_DEBUG=DETAIL", "")
    else:
        assert call.run(gd) == Outcome((0, 1), 1)
    check_group(2)


def test_torch_debug_detail(tmp_path):
    run(in_detail, 2, tmp_path, init=False)


def in_threads(me: Rank, same_group: bool) -> None:
    """Two threads, each on its group, or both on one: there one takes its turn after the other."""

    class Slow(WeakKeyDictionary):
        """As if the threads were switched in the middle of the first op."""

        def __setitem__(self, *item: Any) -> None:
            time.sleep(0.05)
            super().__setitem__(*item)

    _retry._backends = Slow()
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    failures: list[BaseException] = []
    expected = torch.stack([random_tensor(1003, torch.int64, rank, 0) for rank in range(3)]).sum(0)

    def work(group: dist.ProcessGroup) -> None:
        try:
            for _ in range(100):
                x = random_tensor(1003, torch.int64, me.rank, 0).clone()
                assert gd.all_reduce(x, group=group) == Outcome((0, 1, 2), 1)
                assert torch.equal(x, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(groups[i * (not same_group)],)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    record = gd.flight_record(groups[0])["entries"]
    assert [e["collective_seq_id"] for e in record] == [*range(1, 101 + 100 * same_group)]


@pytest.mark.parametrize("same_group", [False, True])
def test_threads(same_group, tmp_path):
    run(in_threads, 3, tmp_path, same_group)


def beside_async_ops(me: Rank) -> None:
    for count in (1003, LARGE):
        s = Setting(me.rank, me.size, count)
        plain, again = ([call_of("all_reduce", s) for _ in range(5)] for _ in "12")
        works = [call.run(dist, async_op=True) for call in plain]
        if me.rank == 1:
            time.sleep(0.05)
        ours, theirs = (call_of("all_to_all", s) for _ in "12")
        assert ours.run(gd) == Outcome((0, 1, 2), 1)
        theirs.run(dist)
        assert_same(ours, theirs, "retried")
        for work, call, expected in zip(works, plain, again, strict=True):
            work.wait()
            expected.run(dist)
            assert_same(call, expected, "async")


def after_a_failure(me: Rank) -> None:
    """Of a plain op: one that may pass is mended, a wish is respected."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=1)
    for i in range(3):
        if me.rank == 1:
            me.store().wait([f"failed {i}"])
        with pytest.raises(gd.CollectiveTimeout):
            dist.group.WORLD.allreduce([torch.randn(3)], options).wait()
        me.store().set(f"failed {i}", "")
        ours, theirs = (call_of("all_gather", Setting(me.rank, me.size)) for _ in "12")
        assert ours.run(gd) == Outcome((0, 1, 2), 1)
        theirs.run(dist)
        assert_same(ours, theirs, "after a timeout")
    gd.abort(dist.group.WORLD)
    refused(ours, gd.CollectiveAborted, "aborted the group", "after an abort")
    refused(ours, gd.CollectiveAborted, "aborted the group", "after an abort")
    gd.rebuild()
    check_group(3)


def late(me: Rank) -> None:
    """Rank 1 comes when the first try is over: all try again with it. Each try is remembered."""
    gd.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def tell() -> None:
        while backend.failure() is None:
            time.sleep(0.01)
        me.store().set("the first try is over", "")

    if me.rank == 0:
        threading.Thread(target=tell).start()
    elif me.rank == 1:
        me.store().wait(["the first try is over"])
    ours, theirs = (call_of("reduce_scatter", Setting(me.rank, me.size)) for _ in "12")
    # It may take 1.5 s; then rank 1 is waited for, for half a second.
    assert ours.run(gd, timeout=timedelta(seconds=3)) == Outcome((0, 1, 2), 2)
    *_, first, second = gd.flight_record()["entries"]
    assert [e["profiling_name"] for e in (first, second)] == ["gpumode:reduce_scatter"] * 2
    assert [e["attempt"] for e in (first, second)] == [0, 1]
    assert [e["state"] for e in (first, second)] == ["started", "completed"]
    assert [e["error"] is None for e in (first, second)] == [False, True]
    assert first["epoch"] != second["epoch"]
    assert second["collective_seq_id"] == 1
    theirs.run(dist)
    assert_same(ours, theirs, "retried")


@pytest.mark.parametrize("function", [beside_async_ops, after_a_failure, late])
def test_beside_others(function, tmp_path):
    run(function, 3, tmp_path)
