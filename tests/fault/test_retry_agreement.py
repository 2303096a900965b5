"""How the ranks that are left agree: through rebuilds, more deaths, and a store that fails."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _calls import die, raises, reduce, value
from _ranks import Rank, Ranks, check_group, run

import torch_gpumode.distributed as gd


def abort_or_rebuild(me: Rank, who: int, call: str, recovering: bool) -> None:
    """The others wait for rank 3, in the op or to recover. None has a result; all start over."""
    survivors = [0, 2, 3] if recovering else [0, 1, 2, 3]
    reduce(me, [0, 1, 2, 3])
    if recovering and me.rank == 1:
        die()
    function = functools.partial(gd.abort, dist.group.WORLD) if call == "abort" else gd.rebuild
    starts_over = me.rank == who and call == "rebuild"
    timer = threading.Timer(0.3, function)
    if me.rank == who == 0:  # beside its op
        timer.start()
    elif me.rank == who:  # instead of it
        time.sleep(0.3)
        function()
    elif me.rank == 3:
        me.store().wait(["aborted"])
    if not starts_over or who == 0:
        raises(gd.CollectiveAborted)
        me.store().set("aborted", "")
    if not starts_over:
        raises(gd.CollectiveAborted)
        gd.rebuild()
    elif who == 0:
        timer.join()
    assert reduce(me, survivors) == (tuple(survivors), 1)
    check_group(len(survivors))


@pytest.mark.parametrize("recovering", [False, True])
@pytest.mark.parametrize(
    ("who", "call"), [(0, "abort"), (0, "rebuild"), (3, "abort"), (3, "rebuild")]
)
def test_start_over(who, call, recovering, tmp_path):
    with Ranks(abort_or_rebuild, 4, tmp_path, who, call, recovering) as ranks:
        ranks.join(lost=(1,) if recovering else ())


class Watched(dist.Store):
    """Another store, whose client does as it is told before and after each question."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def before(self, name: str, *args: Any) -> None: ...

    def after(self, name: str, *args: Any) -> None: ...


def _forward(name: str) -> Callable[..., Any]:
    def ask(self: Watched, *args: Any) -> Any:
        self.before(name, *args)
        answer = getattr(self.store, name)(*args)
        self.after(name, *args)
        return answer

    return ask


for _name in (
    *("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set"),
    *("delete_key", "num_keys", "set_timeout", "has_extended_api"),
):
    setattr(Watched, _name, _forward(_name))


class RedoneWithoutIt(Watched):
    """Says that its program starts over only when the others redo the op that it was in."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.report = ""
        self.reported = threading.Event()

    def before(self, name: str, *args: Any) -> None:
        if name == "set" and args[0] == self.report:
            # No wait: that would keep the client from the other thread.
            while not self.store.check([self.report.split("/report/")[0] + "/decision"]):
                time.sleep(0.001)

    def after(self, name: str, *args: Any) -> None:
        if name == "set" and "/report/" in args[0]:
            self.report = args[0]
            self.reported.set()


def start_over_too_late(me: Rank) -> None:
    store = RedoneWithoutIt(me.store())
    me.init(store=store if me.rank == 0 else me.store())
    reduce(me, [0, 1, 2, 3])
    if me.rank == 1:
        die()
    thread = threading.Thread(target=lambda: store.reported.wait(30) and gd.rebuild())
    if me.rank == 0:
        thread.start()
    elif me.rank == 3:
        me.store().wait(["aborted"])
    raises(gd.CollectiveAborted)
    me.store().set("aborted", "")
    if me.rank == 0:
        thread.join()
    else:
        gd.rebuild()
    assert reduce(me, [0, 2, 3]) == ((0, 2, 3), 1)
    check_group(3)


def test_start_over_when_others_redo(tmp_path):
    """The others have decided to redo an op with a rank that rebuilds: it is not left out."""
    with Ranks(start_over_too_late, 4, tmp_path, init=False) as ranks:
        ranks.join(lost=(1,))


class Mortal(Watched):
    """A store that its client dies of: before or after the n-th question of a kind."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.plan: tuple[str, str, int] | None = None
        self.waits = False  # for whoever is to decide first

    def before(self, name: str, *args: Any) -> None:
        if name == "compare_set" and self.waits:
            self.store.wait(["decided"])
        self.count_down(name, "before")

    def after(self, name: str, *args: Any) -> None:
        self.count_down(name, "after")

    def count_down(self, name: str, when: str) -> None:
        if self.plan is None or self.plan[:2] != (name, when):
            return
        self.plan = (name, when, self.plan[2] - 1)
        if self.plan[2] == 0:
            if name == "compare_set":
                self.store.set("decided", "")
            die()


def die_on_the_way(me: Rank, plans: dict[int, tuple[str, str, int]]) -> None:
    store = Mortal(me.store())
    me.init(store=store)
    everybody = list(range(me.size))
    reduce(me, everybody)
    store.plan = plans.get(me.rank)
    decides = [rank for rank, plan in plans.items() if plan[0] == "compare_set"]
    store.waits = bool(decides) and me.rank not in decides
    if me.rank == 1:
        die()
    survivors = [rank for rank in everybody if rank != 1 and rank not in plans]
    assert reduce(me, survivors).contributors == tuple(survivors)
    check_group(len(survivors))


DEATHS = {
    "before the report": {3: ("set", "before", 1)},
    "after the report": {3: ("set", "after", 1)},
    "before the decision": {3: ("compare_set", "before", 1)},
    "after the decision": {3: ("compare_set", "after", 1)},
    "a third": {3: ("compare_set", "after", 1), 2: ("set", "after", 2)},
    "first and last": {0: ("compare_set", "before", 1), 4: ("set", "after", 1)},
}


@pytest.mark.parametrize("case", DEATHS)
def test_more_deaths_on_the_way(case, tmp_path):
    with Ranks(die_on_the_way, 5, tmp_path, DEATHS[case], init=False) as ranks:
        ranks.join(lost=(1, *DEATHS[case]))


def store_dies(me: Rank) -> None:
    reduce(me, [0, 1, 2])
    if me.rank == 1:
        os.kill(me.store_pid, signal.SIGKILL)
        die()
    gone = (dist.DistStoreError, dist.DistNetworkError, gd.CollectiveTimeout)
    assert raises(gone, timeout=timedelta(seconds=3)) < 4
    raises(gd.CollectiveAborted)
    with pytest.raises(gone):
        gd.rebuild(timeout=timedelta(seconds=3))


def test_store_dies(tmp_path):
    with Ranks(store_dies, 3, tmp_path) as ranks:
        ranks.join(lost=(1,))


def store_freezes(me: Rank) -> None:
    """Case F14."""
    reduce(me, [0, 1, 2])
    if me.rank == 1:
        os.kill(me.store_pid, signal.SIGSTOP)
        die()
    assert raises(gd.CollectiveTimeout, timeout=timedelta(seconds=2)) < 3
    raises(gd.CollectiveAborted)
    me.say(me.store_pid)
    gd.rebuild()
    assert reduce(me, [0, 2]) == ((0, 2), 1)


def test_store_freezes(tmp_path):
    with Ranks(store_freezes, 3, tmp_path) as ranks:
        pid, _ = ranks.heard(0), ranks.heard(2)
        os.kill(pid, signal.SIGCONT)
        ranks.join(lost=(1,))


def early(me: Rank) -> None:
    """Few do not leave out many that may be alive, unless they are told to."""
    store = me.store("early")
    if me.rank == 0:
        assert 0.9 < raises(gd.CollectiveTimeout, timeout=timedelta(seconds=1)) < 2
        with pytest.raises(gd.CollectiveTimeout, match="more are late, and may be alive"):
            gd.rebuild(timeout=timedelta(seconds=1))
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
    gd.rebuild()
    check_group(3)
    assert reduce(me, [0, 1, 2]) == ((0, 1, 2), 1)
    if me.rank == 0:
        x = value(0)
        outcome = gd.all_reduce(x, timeout=timedelta(seconds=1), min_size=1)
        assert outcome.contributors == (0,)
        assert torch.equal(x, value(0))
        store.set("went on", "")
    else:
        store.wait(["went on"])
        raises(gd.WorldTooSmall)


def test_few_do_not_leave_out_many(tmp_path):
    run(early, 3, tmp_path)
