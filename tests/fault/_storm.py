"""What happens in a storm: ranks reduce, gather and scatter without pause, and some are killed.

A plan, drawn from a seed, says all but time: who is killed or frozen in which op, how long after it
began, and the values. Each rank notes what became of its ops in memory that outlives it, and
test_storm.py checks that.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import mmap
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks
from _values import poisoned, same_bits

import torch_gpumode.distributed as gd

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
NAMES = {"all_reduce": 6, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "broadcast": 1}
MOST_ELEMENTS = 1 << 20
MOST_RANKS = 8

FROZEN, FROZEN_SECOND = 0.1, 0.35  # of the first victims of an op, and of the second
TIMEOUT_S, TIMEOUT_WITH_FROZEN_S = 30.0, 3.0
LIMIT_S = 60.0  # of a world
POLL_S = 20e-6
STILL_AFTER_S = 1e-3  # a signal takes microseconds to stop another processor
OPS_AT_THE_END = 3  # after the last victim was struck

# ----------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Op:
    name: str  # of the function
    dtype: torch.dtype
    average: bool  # if it reduces: not the sum
    count: int  # elements of the tensor, or of each rank's part of it


@dataclass(frozen=True)
class Victim:
    rank: int
    op: int
    after: str  # what the delay counts from: see AFTER
    delay_s: float
    freezes: bool  # SIGSTOP, else SIGKILL
    # SIGCONT: after this time, or when the others have gone on for so many ops. Neither: never.
    thaw_s: float | None
    thaw_ops: int | None


# Weights. A second victim comes after the first: at once, or during the recovery.
AFTER = {
    "it entered": 4,
    "it has the result": 1,  # maybe the only one
    "the keeper entered": 3,  # late: all had been waiting for it
}
SECOND = "the one before"


@dataclass(frozen=True)
class Plan:
    seed: int
    world: int
    size: int
    keeper: int  # the rank that nothing happens to
    ops: list[Op]
    victims: list[Victim]
    lags_s: dict[tuple[int, int], float]  # how much later than others a rank comes to an op
    timeout_s: float

    @property
    def freezes(self) -> bool:
        return any(victim.freezes for victim in self.victims)

    def num_struck_before(self, op: int) -> int:
        """How many victims must have been struck before a rank may enter an op.

        Those of one op before the next op that has some, and all of them well before the end.
        """
        if op >= len(self.ops) - OPS_AT_THE_END:
            return len(self.victims)
        latest = max((victim.op for victim in self.victims if victim.op <= op), default=0)
        return sum(victim.op < latest for victim in self.victims)


def draw(seed: int, world: int) -> Plan:
    rng = random.Random(f"{seed}/{world}")
    size = rng.randint(2, MOST_RANKS)
    keeper, *others = rng.sample(range(size), size)
    lost = others[: size - rng.choice([1, 2])] or others  # one or two are left
    victims = _draw_victims(rng, lost)
    num_ops = victims[-1].op + 1 + OPS_AT_THE_END + rng.randint(1, 4)
    ops = [_draw_op(rng, 1, MOST_ELEMENTS) for _ in range(num_ops)]
    lags_s = {
        (op, rank): rng.uniform(1e-3, 8e-3)
        for op, rank in itertools.product(range(num_ops), range(size))
        if rng.random() < 0.05
    }
    for victim in victims:
        # Who waits for the keeper has handed over all of a small input, and is not done.
        waits = victim.freezes and victim.after == "it entered" and rng.random() < 0.5
        if waits or victim.after == "the keeper entered":
            ops[victim.op] = _draw_op(rng, 1, 256)
            lags_s[victim.op, keeper] = 8e-3
        elif victim.after != SECOND and rng.random() < 0.6:
            ops[victim.op] = _draw_op(rng, MOST_ELEMENTS // 20, MOST_ELEMENTS)
    timeout_s = TIMEOUT_WITH_FROZEN_S if any(v.freezes for v in victims) else TIMEOUT_S
    return Plan(seed, world, size, keeper, ops, victims, lags_s, timeout_s)


def _draw_victims(rng: random.Random, ranks: list[int]) -> list[Victim]:
    victims: list[Victim] = []
    op = rng.randint(0, 3)
    for rank in ranks:
        if victims and victims[-1].after != SECOND and rng.random() < 0.5:
            after = SECOND
        else:
            after = rng.choices(list(AFTER), list(AFTER.values()))[0]
            op += rng.randint(1, 12) if victims else 0
        if after == SECOND:
            delay_s = _log_uniform(rng, 1e-5, 2e-2) if rng.random() < 0.7 else 0.0
        elif after == "it entered":
            delay_s = _log_uniform(rng, 1e-5, 5e-3)
        else:
            delay_s = rng.uniform(0, 5e-5)
        freezes = rng.random() < (FROZEN_SECOND if after == SECOND else FROZEN)
        thaw_s = thaw_ops = None
        how = rng.random() if freezes else 1.0
        if how < 0.6:
            thaw_ops = rng.randint(1, 5)
        elif how < 0.9:  # about when the others' op fails, or when they decide to go on without it
            thaw_s = rng.choice([1 / 2, 2 / 3]) * TIMEOUT_WITH_FROZEN_S + rng.gauss(0, 0.03)
        victims.append(Victim(rank, op, after, delay_s, freezes, thaw_s, thaw_ops))
    return victims


def _draw_op(rng: random.Random, least: int, most: int) -> Op:
    name = rng.choices(list(NAMES), list(NAMES.values()))[0]
    count = round(_log_uniform(rng, least, most))
    if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        count = -(-count // MOST_RANKS)
    return Op(name, rng.choice(DTYPES), rng.random() < 0.5, count)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


# ------------------------------------------------------------------------- values and references


@functools.cache
def pool(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        wide = torch.randn(2 * MOST_ELEMENTS, generator=generator, dtype=torch.float64)
        return wide.to(dtype)
    return torch.randint(-(2**63), 2**63 - 1, (2 * MOST_ELEMENTS,), generator=generator)


def values(plan: Plan, number: int, rank: int, part: int = 0) -> torch.Tensor:
    """What a rank puts into an op. Not to be written to.

    A piece of one pool: to draw the values would take longer than the op.
    """
    op = plan.ops[number]
    drawn = pool(plan.seed, op.dtype)
    begin = hash((plan.seed, plan.world, number, rank, part)) % (drawn.numel() - op.count)
    return drawn[begin : begin + op.count]


def reference(plan: Plan, number: int, rank: int, contributors: tuple[int, ...]) -> torch.Tensor:
    """What the op must give a rank, as docs and reduce_kernels.h say: in the order of ranks."""
    op = plan.ops[number]
    if op.name == "broadcast":
        return values(plan, number, plan.keeper)
    part = rank if op.name == "reduce_scatter_tensor" else 0
    inputs = [values(plan, number, each, part) for each in contributors]
    if op.name == "all_gather_into_tensor":
        return torch.cat(inputs)
    wide = torch.float32 if op.dtype == torch.bfloat16 else op.dtype
    total = inputs[0].to(wide)
    for each in inputs[1:]:
        total = total + each.to(wide)
    if op.average:
        rounding = None if op.dtype.is_floating_point else "trunc"
        total = torch.div(total, len(inputs), rounding_mode=rounding)
    return total.to(op.dtype)


def digest(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# ---------------------------------------------------------------------------------- a rank's life

NOT_ENTERED, ENTERED, RETURNED, RAISED = range(4)
RECORD = np.dtype(
    [
        ("state", "u4"),  # written last: a record that has it is whole
        ("contributors", "u4"),  # as members_after, one bit for each rank
        ("members_after", "u4"),
        ("attempts", "u4"),
        ("digest", "u8"),
        ("intact", "u1"),  # all that the op may not change
        ("error", "S24"),
        ("entered_at", "f8"),  # time.monotonic()
        ("ended_at", "f8"),
    ]
)


class Notes:
    """What all ranks have noted. Memory of this process, which they share and may die over."""

    def __init__(self, plan: Plan) -> None:
        shape = (plan.size, len(plan.ops))
        memory = mmap.mmap(-1, 64 + RECORD.itemsize * math.prod(shape))
        self.records = np.frombuffer(memory, RECORD, math.prod(shape), 64).reshape(shape)
        self.num_struck = np.frombuffer(memory, "u4", 1)

    def state(self, rank: int, number: int) -> int:
        return int(self.records[rank, number]["state"])


def _bits(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)


class Call:
    """One rank's part in an op: its tensors, the one that is written first."""

    def __init__(self, plan: Plan, number: int, rank: int, callers: list[int]) -> None:
        self.op, self.rank, self.callers = plan.ops[number], rank, callers
        # The keeper is to go on, however many are frozen.
        self.min_size = 1 if plan.freezes else None
        own = functools.partial(values, plan, number, rank)
        if self.op.name == "all_gather_into_tensor":
            tensors = [poisoned(len(callers) * self.op.count, self.op.dtype), own()]
        elif self.op.name == "reduce_scatter_tensor":
            parts = torch.cat([own(each) for each in callers])
            tensors = [poisoned(self.op.count, self.op.dtype), parts]
        elif self.op.name == "broadcast" and rank != plan.keeper:
            tensors = [poisoned(self.op.count, self.op.dtype)]
        else:
            tensors = [own()]
        self.before, self.tensors = tensors, [tensor.clone() for tensor in tensors]
        self.arguments: list[object] = []
        if self.op.name == "broadcast":
            self.arguments = [callers.index(plan.keeper)]
        elif self.op.name != "all_gather_into_tensor":
            self.arguments = [dist.ReduceOp.AVG if self.op.average else dist.ReduceOp.SUM]

    def run(self) -> gd.Outcome:
        call = getattr(gd, self.op.name)
        return call(*self.tensors, *self.arguments, min_size=self.min_size)

    def unchanged(self) -> bool:
        return all(map(same_bits, self.tensors, self.before))

    def result(self, contributors: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
        """Returns what was written, and whether all else is as it was."""
        written, *rest = self.tensors
        intact = all(map(same_bits, rest, self.before[1:]))
        if self.op.name == "all_gather_into_tensor":
            parts = dict(zip(self.callers, written.chunk(len(self.callers)), strict=True))
            written = torch.cat([parts.pop(rank) for rank in contributors])
            intact &= all(same_bits(p, poisoned(p.numel(), p.dtype)) for p in parts.values())
        return written, intact


def live(me: Rank, plan: Plan, notes: Notes) -> str:
    """Returns the traceback of the error that ended it early, if one of ours did."""
    for number in range(len(plan.ops)):
        num_struck = plan.num_struck_before(number)
        while notes.num_struck[0] < num_struck:
            time.sleep(POLL_S)
        time.sleep(plan.lags_s.get((number, me.rank), 0))
        call = Call(plan, number, me.rank, gd.initial_ranks())
        record = notes.records[me.rank, number]
        record["entered_at"] = time.monotonic()
        record["state"] = ENTERED
        try:
            outcome = call.run()
        except BaseException as error:
            record["ended_at"] = time.monotonic()
            record["error"] = type(error).__name__
            record["intact"] = call.unchanged()
            record["state"] = RAISED
            if isinstance(error, dist.DistBackendError):
                return traceback.format_exc()
            raise
        record["ended_at"] = time.monotonic()
        written, record["intact"] = call.result(outcome.contributors)
        record["digest"] = digest(written)
        record["contributors"] = _bits(outcome.contributors)
        record["members_after"] = _bits(gd.initial_ranks())
        record["attempts"] = outcome.attempts
        record["state"] = RETURNED
    return ""


# -------------------------------------------------------------------------------------- the storm


class Strikes:
    """Kills, freezes and thaws ranks as planned."""

    def __init__(self, plan: Plan, notes: Notes, ranks: Ranks) -> None:
        self.plan, self.notes, self.ranks = plan, notes, ranks
        self.deadline = time.monotonic() + LIMIT_S
        self.struck_at: dict[int, float] = {}
        self.still_at: dict[int, float] = {}  # a while later: from then on it did nothing
        self.thawed_at: dict[int, float] = {}
        self.killed: list[int] = []
        self.num_within_op = 0
        self.frozen: dict[int, Victim] = {}

    def run(self) -> None:
        last = len(self.plan.ops) - 1
        try:
            for victim in self.plan.victims:
                if victim.after != SECOND:
                    self._until(functools.partial(self._began, victim))
                time.sleep(victim.delay_s)
                self._strike(victim)
            self._until(lambda: self.notes.state(self.plan.keeper, last) > ENTERED)
        except TimeoutError:
            pass  # who joins the ranks hears what is wrong
        finally:
            self.notes.num_struck[0] = len(self.plan.victims)
            for victim in list(self.frozen.values()):
                self._thaw(victim)

    def _began(self, victim: Victim) -> bool:
        keeper = victim.after == "the keeper entered"
        record = self.notes.records[self.plan.keeper if keeper else victim.rank, victim.op]
        return record["ended_at" if victim.after == "it has the result" else "entered_at"] > 0

    def _until(self, condition: Callable[[], object]) -> None:
        """Waits, and thaws meanwhile whose time has come. Gives up if a rank did."""
        while not condition():
            for victim in list(self.frozen.values()):
                if self._is_due(victim):
                    self._thaw(victim)
            if time.monotonic() > self.deadline or self._somebody_raised():
                raise TimeoutError
            time.sleep(POLL_S)

    def _somebody_raised(self) -> bool:
        raised = (self.notes.records["state"] == RAISED).any(1)
        return any(raised[rank] for rank in range(self.plan.size) if rank not in self.struck_at)

    def _strike(self, victim: Victim) -> None:
        signum = signal.SIGSTOP if victim.freezes else signal.SIGKILL
        self.struck_at[victim.rank] = self.ranks.signal(victim.rank, signum)
        self.still_at[victim.rank] = time.monotonic() + STILL_AFTER_S
        self.num_within_op += bool((self.notes.records[victim.rank]["state"] == ENTERED).any())
        if victim.freezes:
            self.frozen[victim.rank] = victim
        else:
            self.killed.append(victim.rank)
        self.notes.num_struck[0] = len(self.struck_at)

    def _is_due(self, victim: Victim) -> bool:
        if victim.thaw_s is not None:
            return time.monotonic() > self.struck_at[victim.rank] + victim.thaw_s
        if victim.thaw_ops is None:
            return False
        number = min(victim.op + victim.thaw_ops, len(self.plan.ops) - 1)
        return self.notes.state(self.plan.keeper, number) >= ENTERED

    def _thaw(self, victim: Victim) -> None:
        del self.frozen[victim.rank]
        if victim.thaw_s is None and victim.thaw_ops is None:
            self.ranks.signal(victim.rank, signal.SIGKILL)
            self.killed.append(victim.rank)
        else:
            self.thawed_at[victim.rank] = self.ranks.signal(victim.rank, signal.SIGCONT)
