"""A storm of kills (case F11): nobody has a wrong result, and those who live go on.

    python tests/fault/test_storm.py --kills 1000
    python tests/fault/test_storm.py --seed 5 --world 17 --kills 50    # one world, again and again

Checked after each world: all that have a result of an op, lost ranks too, have the same, of the
same contributors, and it is what their inputs make, bit for bit. Contributors only get fewer. Ranks
that nothing happened to never raise, and end together. A frozen rank that the others went on
without is told so, and its tensors are as they were. Every op ends within its timeout and a second.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

import numpy as np
import pytest
import torch
from _ranks import Ranks
from _storm import (
    DTYPES,
    ENTERED,
    LIMIT_S,
    RAISED,
    RETURNED,
    Call,
    Notes,
    Plan,
    Strikes,
    digest,
    draw,
    live,
    pool,
    reference,
)

import torch_gpumode.distributed as gd

GRACE_S = 1.0  # what the promise adds to a timeout


@dataclass
class Tally:
    """What happened in a storm."""

    kills: int = 0
    frozen: int = 0
    stayed: int = 0
    within_op: int = 0
    worlds: int = 0
    results: int = 0
    redone: int = 0
    decided: int = 0
    # From a kill to the next result of a rank that lives; SIGKILL in worlds where nobody freezes.
    after_kill_s: list[float] = field(default_factory=list)
    after_stop_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.within_op} within an op, {self.frozen} by SIGSTOP ("
            f"{self.stayed} thawed in time); {self.worlds} worlds; {self.results} results checked; "
            f"{self.redone} ops redone, {self.decided} published by decision; next result after "
            f"SIGKILL {_times(self.after_kill_s)}, after SIGSTOP {_times(self.after_stop_s)}"
        )


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds) * 1e3:.0f} ms (at most {max(seconds) * 1e3:.0f} ms)"


class Checks:
    """Of one world, which is over. `problems` is what is wrong."""

    def __init__(self, plan: Plan, notes: Notes, strikes: Strikes, tally: Tally) -> None:
        self.plan, self.strikes, self.tally = plan, strikes, tally
        self.records, self.keepers = notes.records, notes.records[plan.keeper]
        self.problems: list[str] = []
        everybody = before = frozenset(range(plan.size))
        for number in range(len(plan.ops)):
            before = self._op(number, before)
        for rank in everybody:
            self._life(rank)
        finished = {rank for rank in everybody if self._finished(rank)}
        self._expect(before == finished, f"at the end {before} contribute, and {finished} are done")
        self._count()

    def _expect(self, truth: object, what: str) -> None:
        if not truth:
            self.problems.append(what)

    def _finished(self, rank: int) -> bool:
        return bool((self.records[rank]["state"] == RETURNED).all())

    def _op(self, number: int, before: frozenset[int]) -> frozenset[int]:
        """What the ranks that have a result say of it. Returns the contributors."""
        plan, op = self.plan, f"op {number}, {self.plan.ops[number]}"
        results = {
            r: rec for r, rec in enumerate(self.records[:, number]) if rec["state"] == RETURNED
        }
        said = {rank: _ranks_of(record["contributors"]) for rank, record in results.items()}
        self._expect(len(set(said.values())) <= 1, f"{op}: contributors differ, {said}")
        digest_of = functools.cache(lambda *key: digest(reference(plan, number, *key)))
        for rank, record in results.items():
            who = f"{op}, rank {rank}, contributors {said[rank]}"
            receiver = rank if plan.ops[number].name == "reduce_scatter_tensor" else 0
            right = digest_of(receiver, said[rank])
            self._expect(int(record["digest"]) == right, f"{who}: wrong result")
            self._expect(record["intact"], f"{who}: wrote where it must not")
            self._expect(rank in said[rank], f"{who}: has a result, and is none of them")
            self._expect(before.issuperset(said[rank]), f"{who}: before there were {set(before)}")
            needed = record["attempts"] == 1 or before != set(said[rank]) or plan.freezes
            self._expect(needed, f"{who}: redone, and nobody was lost")
            self._done_everywhere(number, who, record, said[rank])
        self.tally.results += len(results)
        self.tally.redone += any(record["attempts"] > 1 for record in results.values())
        # The result holds the input of a member that is lost since: nothing was redone.
        self.tally.decided += any(
            record["contributors"] & ~record["members_after"] for record in results.values()
        )
        return frozenset(said.get(plan.keeper, before))

    def _done_everywhere(self, number: int, who: str, record: np.void, said: tuple) -> None:
        """That a result was taken once all contributors were done, or after a decision.

        Who was struck before the last of them came was not done.
        """
        last_came_at = max(self.records[list(said), number]["entered_at"])
        for rank in said:
            thawed_at = self.strikes.thawed_at.get(rank, math.inf)
            still_at = self.strikes.still_at.get(rank, math.inf)
            if still_at < last_came_at and record["ended_at"] < thawed_at:
                decided = not record["members_after"] >> rank & 1
                self._expect(decided, f"{who}: took the result, and rank {rank} was not done")

    def _life(self, rank: int) -> None:
        """That a rank came to the end it should, each op in time."""
        struck = rank in self.strikes.struck_at
        self._expect(struck or self._finished(rank), f"rank {rank} was not struck, and is not done")
        for number, record in enumerate(self.records[rank]):
            if record["state"] > ENTERED:
                who = f"rank {rank}, op {number}, {self.plan.ops[number]}"
                self._in_time(rank, who, record)
            if record["state"] == RAISED:
                self._raised(rank, number, who, record)
        if rank in self.strikes.thawed_at:
            ended = self._finished(rank) or (self.records[rank]["state"] == RAISED).any()
            self._expect(ended, f"rank {rank} was thawed, and neither raised nor is done")

    def _in_time(self, rank: int, who: str, record: np.void) -> None:
        entered_at, ended_at = record["entered_at"], record["ended_at"]
        thawed_at = self.strikes.thawed_at.get(rank, -math.inf)
        due_at = max(entered_at + self.plan.timeout_s + GRACE_S, thawed_at + GRACE_S)
        if not self.plan.freezes:
            due_at = entered_at + self.plan.timeout_s / 2  # deaths are noticed, not waited for
        self._expect(ended_at < due_at, f"{who}: took {ended_at - entered_at:.1f} s")

    def _raised(self, rank: int, number: int, who: str, record: np.void) -> None:
        """Only a frozen rank may have, and only because the others went on without it."""
        who += f", raised {record['error'].decode()}"
        struck_at = self.strikes.struck_at.get(rank, math.inf)
        self._expect(record["ended_at"] > struck_at, f"{who}: before it was struck")
        self._expect(record["intact"], f"{who}: its tensors have changed")
        # It may have been thawed when its own time was up.
        late = record["ended_at"] >= record["entered_at"] + self.plan.timeout_s
        right = [b"WorldTooSmall", b"CollectiveTimeout"][: 1 + late]
        self._expect(record["error"] in right, f"{who}: expected {right}")
        later = self.keepers[number + 1 :]["contributors"]
        self._expect(not (later >> rank & 1).any(), f"{who}: it contributes to later ops")

    def _count(self) -> None:
        tally = self.tally
        tally.worlds += 1
        tally.kills += len(self.strikes.struck_at)
        tally.within_op += self.strikes.num_within_op
        for victim in self.plan.victims:
            if victim.rank not in self.strikes.struck_at:
                continue
            tally.frozen += victim.freezes
            gone = (self.keepers["members_after"] >> victim.rank & 1) == 0
            gone &= self.keepers["state"] == RETURNED
            if not gone.any():
                tally.stayed += 1
                continue
            after_s = self.keepers["ended_at"][gone][0] - self.strikes.struck_at[victim.rank]
            if victim.freezes:
                tally.after_stop_s.append(after_s)
            elif not self.plan.freezes:
                tally.after_kill_s.append(after_s)


def _ranks_of(bits: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(32) if int(bits) >> rank & 1)


def run_world(plan: Plan, folder: Path, tally: Tally) -> None:
    notes = Notes(plan)
    problems = []
    with Ranks(
        *(live, plan.size, folder, plan, notes), timeout_s=plan.timeout_s, limit_s=LIMIT_S
    ) as ranks:
        strikes = Strikes(plan, notes, ranks)
        strikes.run()
        try:
            errors = ranks.join(lost=tuple(strikes.killed))
        except AssertionError as error:
            problems, errors = [str(error)], []
    problems = Checks(plan, notes, strikes, tally).problems + problems
    if not problems:
        return
    problems += [f"--- rank {rank}\n{error}" for rank, error in enumerate(errors) if error]
    raise AssertionError(
        "\n".join(problems) + f"\n\n{plan.size} ranks; {plan.victims}\n"
        f"This is world {plan.world} of seed {plan.seed}. To play it again and again:\n"
        f"python tests/fault/test_storm.py --seed {plan.seed} --world {plan.world} --kills 100"
    )


def storm(kills: int, folder: Path, seed: int | None = None, world: int | None = None) -> None:
    """Runs worlds, or one of them again and again, until so many ranks were killed or frozen."""
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    for dtype in DTYPES:
        pool(seed, dtype)  # before ranks are forked
    tally = Tally()
    while tally.kills < kills:
        run_world(draw(seed, tally.worlds if world is None else world), folder, tally)
        if sys.stderr.isatty():
            print(f"\r{tally.kills} of {kills} kills ", end="", file=sys.stderr, flush=True)
    print(tally)
    if kills >= 200 and world is None:  # each is 5 % of the kills or more, on average
        assert min(tally.decided, tally.frozen, tally.redone) > 0, "this was no storm"


def test_200_kills(tmp_path):
    storm(200, tmp_path)


# What a bug could do to one rank, and what the storm must say then.


def wrong_input(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    call.tensors[-1].view(torch.uint8)[0] ^= 1
    return run(call)


def forgotten_contributor(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    outcome = run(call)
    return outcome._replace(contributors=outcome.contributors[1:])


def changed_input(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    outcome = run(call)
    call.tensors[-1].view(torch.uint8)[-1] ^= len(call.tensors) > 1
    return outcome


def retry_for_nothing(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    return run(call)._replace(attempts=2)


def error_for_nothing(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    run(call)
    raise gd.WorldTooSmall("for no reason")


def changed_and_raised(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    try:
        return run(call)
    except gd.WorldTooSmall:
        call.tensors[0].view(torch.uint8)[-1] ^= 1
        raise


def other_error(call: Call, run: Callable[[Call], gd.Outcome]) -> gd.Outcome:
    try:
        return run(call)
    except gd.WorldTooSmall as error:
        raise gd.CollectiveAborted(str(error)) from None


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (wrong_input, "wrong result"),
        (forgotten_contributor, "contributors differ"),
        (changed_input, "wrote where it must not"),
        (retry_for_nothing, "redone, and nobody was lost"),
        (error_for_nothing, "was not struck, and is not done"),
        (changed_and_raised, "its tensors have changed"),
        (other_error, "expected .*WorldTooSmall"),
    ],
)
def test_a_storm_finds_bugs(bug, says, tmp_path, monkeypatch):
    in_frozen_rank = bug in (changed_and_raised, other_error)

    def fits(plan: Plan) -> bool:
        is_told = any(v.thaw_ops and v.after == "it entered" for v in plan.victims)
        return plan.size == 4 and (is_told if in_frozen_rank else not plan.freezes)

    plan = next(plan for plan in map(functools.partial(draw, 0), itertools.count()) if fits(plan))
    run = Call.run

    def run_with_bug(call: Call) -> gd.Outcome:
        return bug(call, run) if in_frozen_rank or call.rank == plan.keeper else run(call)

    monkeypatch.setattr(Call, "run", run_with_bug)
    with pytest.raises(AssertionError, match=says):
        run_world(plan, tmp_path, Tally())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--world", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of what is called
    with tempfile.TemporaryDirectory() as folder:
        try:
            storm(arguments.kills, Path(folder), arguments.seed, arguments.world)
        except AssertionError as error:
            sys.exit(str(error))
