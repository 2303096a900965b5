"""The collectives: how each one is called, on which data, and what must come out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.14 renames them and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.half,
    "float": torch.float,
    "double": torch.double,
    "bfloat16": torch.bfloat16,
}
REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


@dataclass(frozen=True)
class Problem:
    """One collective to run on one group. `count`: elements of nccl-tests' size (see floor.py)."""

    op: str
    group: dist.ProcessGroup
    count: int
    dtype: torch.dtype = torch.float
    redop: str = "sum"
    root: int = 0
    in_place: bool = True
    seed: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def share(self) -> int:
        """Elements of one rank where `count` is divided between them."""
        return self.count // self.world_size

    def data(self, rank: int, count: int) -> torch.Tensor:
        """Rank `rank`'s input, which every rank can make: [count], random.

        Small whole numbers, so that every order of reduction gives the same bits in every dtype
        and a check can be exact.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + rank)
        low, high = (1, 3) if self.redop == "prod" else (0, 9)
        values = torch.randint(low, high, (count,), dtype=torch.int8, generator=generator)
        return values.to(self.dtype)

    def reduced(self, count: int) -> torch.Tensor:
        """What reducing everybody's data must give: [count]."""
        total = self.data(0, count)
        for rank in range(1, self.world_size):
            value = self.data(rank, count)
            if self.redop == "prod":
                total *= value
            elif self.redop == "min":
                total = torch.minimum(total, value)
            elif self.redop == "max":
                total = torch.maximum(total, value)
            else:
                total += value
        return total / self.world_size if self.redop == "avg" else total

    def poison(self, count: int) -> torch.Tensor:
        """An output nobody has written to: [count], a value that no result has."""
        return torch.full((count,), -77, dtype=torch.int8).to(self.dtype)


@dataclass(frozen=True)
class Call:
    """A collective that is ready to run, again and again."""

    run: Callable[[], object]
    output: torch.Tensor
    # Makes what `output` must be after the first run.
    expected: Callable[[], torch.Tensor]


def all_reduce(p: Problem) -> Call:
    x, op = p.data(p.rank, p.count), REDOPS[p.redop]
    return Call(lambda: dist.all_reduce(x, op, p.group), x, lambda: p.reduced(p.count))


def broadcast(p: Problem) -> Call:
    x = p.data(p.root, p.count) if p.rank == p.root else p.poison(p.count)
    return Call(
        lambda: dist.broadcast(x, group=p.group, group_src=p.root),
        x,
        lambda: p.data(p.root, p.count),
    )


def reduce(p: Problem) -> Call:
    x, op = p.data(p.rank, p.count), REDOPS[p.redop]
    on_root = p.rank == p.root  # elsewhere the result is anything
    return Call(
        lambda: dist.reduce(x, group_dst=p.root, op=op, group=p.group),
        x if on_root else x[:0],
        lambda: p.reduced(p.count) if on_root else x[:0],
    )


def all_gather(p: Problem) -> Call:
    out = p.poison(p.count)
    mine = p.data(p.rank, p.share)
    if p.in_place:
        mine = out[p.rank * p.share :][: p.share].copy_(mine)
    return Call(
        lambda: _all_gather(out, mine, p.group),
        out,
        lambda: torch.cat([p.data(rank, p.share) for rank in range(p.world_size)]),
    )


def reduce_scatter(p: Problem) -> Call:
    x, op = p.data(p.rank, p.count), REDOPS[p.redop]
    out = x[p.rank * p.share :][: p.share] if p.in_place else p.poison(p.share)
    return Call(
        lambda: _reduce_scatter(out, x, op, p.group),
        out,
        lambda: p.reduced(p.count)[p.rank * p.share :][: p.share],
    )


def all_to_all(p: Problem) -> Call:
    x, out = p.data(p.rank, p.count), p.poison(p.count)
    return Call(
        lambda: dist.all_to_all_single(out, x, group=p.group),
        out,
        lambda: torch.cat(
            [p.data(r, p.count)[p.rank * p.share :][: p.share] for r in range(p.world_size)]
        ),
    )


def gather(p: Problem) -> Call:
    x, on_root = p.data(p.rank, p.share), p.rank == p.root
    out = p.poison(p.count if on_root else 0)
    outs = list(out.chunk(p.world_size)) if on_root else None
    return Call(
        lambda: dist.gather(x, outs, group=p.group, group_dst=p.root),
        out,
        lambda: torch.cat([p.data(r, p.share) for r in range(p.world_size)]) if on_root else out,
    )


def scatter(p: Problem) -> Call:
    out = p.poison(p.share)
    parts = list(p.data(p.root, p.count).chunk(p.world_size)) if p.rank == p.root else None
    return Call(
        lambda: dist.scatter(out, parts, group=p.group, group_src=p.root),
        out,
        lambda: p.data(p.root, p.count)[p.rank * p.share :][: p.share],
    )


def send_recv(p: Problem) -> Call:
    """A ring: to the next rank, from the one before."""
    x, out = p.data(p.rank, p.count), p.poison(p.count)
    after, before = (p.rank + 1) % p.world_size, (p.rank - 1) % p.world_size

    def run() -> None:
        works = [
            dist.isend(x, group=p.group, group_dst=after),
            dist.irecv(out, group=p.group, group_src=before),
        ]
        for work in works:
            assert work is not None
            work.wait()

    return Call(run, out, lambda: p.data(before, p.count))


@dataclass(frozen=True)
class Case:
    make: Callable[[Problem], Call]
    out_of_place: bool  # which of the two torch.distributed has
    in_place: bool
    divides: bool = False  # count is divided between the ranks
    reduces: bool = False
    rooted: bool = False


CASES = {
    "all_reduce": Case(all_reduce, False, True, reduces=True),
    "broadcast": Case(broadcast, False, True, rooted=True),
    "reduce": Case(reduce, False, True, reduces=True, rooted=True),
    "all_gather": Case(all_gather, True, True, divides=True),
    "reduce_scatter": Case(reduce_scatter, True, True, divides=True, reduces=True),
    "all_to_all": Case(all_to_all, True, False, divides=True),
    "gather": Case(gather, True, False, divides=True, rooted=True),
    "scatter": Case(scatter, True, False, divides=True, rooted=True),
    "send_recv": Case(send_recv, True, False),
}


def num_wrong(call: Call, *, exact: bool = True) -> int:
    """Runs the collective once, on its first data, and counts the elements that are wrong here.

    exact=False allows two roundings: an average may be a division or a multiplication.
    """
    call.run()
    expected = call.expected()
    if exact:
        return int((call.output != expected).sum())
    rtol = 2 * torch.finfo(call.output.dtype).eps
    return int((~torch.isclose(call.output, expected, rtol=rtol, atol=0)).sum())
