"""Calls of all retried collectives, as one rank sees them, and what they must make."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank
from _values import memory_of, poisoned, random_tensor, same_bits
from torch.distributed import ReduceOp

import torch_gpumode.distributed as gd

AVG = ReduceOp.AVG
COUNTS = [7, 200_003]


class Setting(NamedTuple):
    """A call as one rank sees it. Everybody keeps the number that it began with."""

    members: list[int]  # by rank
    me: int
    root: int
    step: int = 0

    def data(self, who: int, to: int = 0, more: int = 0) -> torch.Tensor:
        step = self.step % 4
        return random_tensor(COUNTS[step % 2] + more, torch.int64, step, who, to).clone()

    def empty(self, more: int = 0) -> torch.Tensor:
        return poisoned(COUNTS[self.step % 2] + more, torch.int64)

    def pieces(self) -> list[torch.Tensor]:
        return [self.data(self.me, each) for each in self.members]

    def holes(self) -> list[torch.Tensor]:
        return [self.empty() for _ in self.members]

    def received(self, who: Collection[int]) -> list[torch.Tensor]:
        """One from each; what those who gave nothing should have written stays as it was."""
        return [self.data(q) if q in who else self.empty() for q in self.members]

    def sum(self, who: Collection[int], to: int = 0) -> torch.Tensor:
        return torch.stack([self.data(each, to) for each in who]).sum(0)

    def mean(self, who: Collection[int], to: int = 0) -> torch.Tensor:
        return self.sum(who, to) // len(who)

    def at_root(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return tensors if self.me == self.root else None

    @property
    def root_rank(self) -> int:
        return self.members.index(self.root)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(len(self.members))[self.members.index(self.me)]


def _gathered_in_place(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat(s.received([s.me]))
    return whole, s.mine(whole)


def _scattered_in_place(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.cat(s.pieces())
    return s.mine(whole), whole


def _scattered(s: Setting, who: Collection[int]) -> list[torch.Tensor]:
    whole = torch.cat([s.mean(who, q) if q == s.me else s.data(s.me, q) for q in s.members])
    return [whole, whole]


def _exchanged(s: Setting, who: Collection[int] = ()) -> tuple[list[torch.Tensor], ...]:
    """What comes out and what goes in. The number of elements depends on both ends."""
    to, fro = ([2 * q + s.me for q in s.members], [2 * s.me + q for q in s.members])
    out = [
        s.data(q, s.me, more) if q in who else s.empty(more)
        for q, more in zip(s.members, to, strict=True)
    ]
    return out, [s.data(s.me, q, more) for q, more in zip(s.members, fro, strict=True)]


def _exchanged_single(s: Setting) -> tuple[Any, ...]:
    both = _exchanged(s)
    return *map(torch.cat, both), *([len(each) for each in half] for half in both)


# What the function is given, and what it makes of these tensors once some have contributed.
CASES: dict[
    str,
    tuple[
        Callable[[Setting], tuple[Any, ...]],
        Callable[[Setting, Collection[int]], list[torch.Tensor]],
    ],
] = {
    "all_reduce": (lambda s: (s.data(s.me), AVG), lambda s, who: [s.mean(who)]),
    "all_reduce_coalesced": (
        lambda s: ([s.data(s.me, i) for i in range(3)],),
        lambda s, who: [s.sum(who, i) for i in range(3)],
    ),
    "broadcast": (lambda s: (s.data(s.me), s.root_rank), lambda s, who: [s.data(s.root)]),
    "reduce": (
        lambda s: (s.data(s.me), s.root_rank),
        lambda s, who: [s.sum(who) if s.me == s.root else s.data(s.me)],
    ),
    "all_gather": (
        lambda s: (s.holes(), s.data(s.me)),
        lambda s, who: [*s.received(who), s.data(s.me)],
    ),
    "all_gather_into_tensor": (
        _gathered_in_place,
        lambda s, who: [torch.cat(s.received({s.me, *who}))] * 2,
    ),
    "gather": (
        lambda s: (s.data(s.me), s.at_root(s.holes()), s.root_rank),
        lambda s, who: [s.data(s.me), *(s.at_root(s.received(who)) or [])],
    ),
    "scatter": (
        lambda s: (s.empty(), s.at_root(s.pieces()), s.root_rank),
        lambda s, who: [s.data(s.root, s.me), *(s.at_root(s.pieces()) or [])],
    ),
    "reduce_scatter": (
        lambda s: (s.empty(), s.pieces()),
        lambda s, who: [s.sum(who, s.me), *s.pieces()],
    ),
    "reduce_scatter_tensor": (lambda s: (*_scattered_in_place(s), AVG), _scattered),
    "all_to_all": (_exchanged, lambda s, who: list(itertools.chain(*_exchanged(s, who)))),
    "all_to_all_single": (
        _exchanged_single,
        lambda s, who: [torch.cat(half) for half in _exchanged(s, who)],
    ),
    "barrier": (lambda s: (), lambda s, who: []),
}
ROOTED = ["broadcast", "reduce", "gather", "scatter"]


class Call:
    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        self.args = CASES[name][0](setting)

    def run(self, **kwargs: Any) -> gd.Outcome:
        return getattr(gd, self.name)(*self.args, **kwargs)

    def memory(self) -> list[torch.Tensor]:
        return memory_of(self.args)

    def assert_result_of(self, who: Collection[int]) -> None:
        """Asserts that the tensors hold what they must if these have contributed."""
        expected = CASES[self.name][1](self.setting, who)
        self.assert_holds([tensor.view(torch.uint8) for tensor in expected])

    def assert_holds(self, expected: list[torch.Tensor]) -> None:
        for i, (got, wanted) in enumerate(zip(self.memory(), expected, strict=True)):
            assert torch.equal(got, wanted), f"{self.name}, {self.setting}, tensor {i}"

    def raises(self, error: type[Exception], match: str = "", **kwargs: Any) -> Exception:
        """Asserts that it raises and changes nothing; returns what it raised."""
        before = [tensor.clone() for tensor in self.memory()]
        with pytest.raises(error, match=match) as caught:
            self.run(**kwargs)
        self.assert_holds(before)
        return caught.value


# A sum, where the kind of op does not matter.


def value(who: int, key: int = 0) -> torch.Tensor:
    return random_tensor(1003, torch.int64, who, key).clone()


def total(who: list[int], key: int = 0) -> torch.Tensor:
    return torch.stack([value(each, key) for each in who]).sum(0)


def reduce(me: Rank, members: list[int], group: dist.ProcessGroup | None = None) -> gd.Outcome:
    """A retried op that these members, by the ranks that they began with, are to complete."""
    x = value(me.rank)
    outcome = gd.all_reduce(x, group=group)
    assert torch.equal(x, total(members)), f"{outcome}, and not the sum of {members}"
    return outcome


def raises(error: type[Exception] | tuple[type[Exception], ...], **kwargs: Any) -> float:
    """Asserts that a retried op raises and changes nothing; returns how long it took, in s."""
    x = value(dist.get_rank(), 5)
    before = x.clone()
    began = time.monotonic()
    with pytest.raises(error):
        gd.all_reduce(x, **kwargs)
    took = time.monotonic() - began
    assert same_bits(x, before)
    return took


def die() -> None:
    signal.raise_signal(signal.SIGKILL)
