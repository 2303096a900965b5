"""Why a collective ended without a result.

All derive from `torch.distributed.DistBackendError`, and reach Python as they are through
`Work.wait`, synchronous calls, `backward()` and futures. After any of them the group is closed:
every later op on it fails at once, until it is rebuilt. The process and other groups go on. Only
`work.wait(timeout)` that does not see the end of its op leaves the op in flight and the group open.
"""

# ruff: noqa: N818  (the names say what happened)
import re

from torch.distributed import DistBackendError

__all__ = [
    "CollectiveAborted",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "PeerLost",
    "WorldTooSmall",
]


class _CollectiveError(DistBackendError):
    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, as it was then, that the failure is about; often empty.

        torch carries only a type and a text from C++ to Python, so they are read off the text.
        """
        found = re.search(r"\[ranks: ([\d, ]+)\]", str(self))
        return [int(rank) for rank in found[1].split(",")] if found else []


class CollectiveAborted(_CollectiveError):
    """Some rank called abort or rebuilt the group, or this one destroyed it, under the op."""


class CollectiveTimeout(_CollectiveError):
    """The deadline of the op passed. `ranks` are those that it still waited for."""


class PeerLost(_CollectiveError):
    """A rank that the op needed is dead or has destroyed its group. `ranks` are those."""


class CollectiveMismatch(_CollectiveError):
    """Ranks disagree on the collective, its order, dtype, op, root or number of elements."""


class WorldTooSmall(_CollectiveError):
    """Too few ranks are left to go on, or the others went on without this one."""
