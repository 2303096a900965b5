"""What a group has done last, and whom its ranks waited for."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_gpumode.distributed import _backend
from torch_gpumode.distributed._groups import backend_of


def flight_record(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Returns the last ops of this rank, in the format of torch's flight recorder.

    When a group fails, other than by a death, every rank writes the same to
    `<prefix>gpumode_rank_<rank>`, where the prefix is $TORCH_FR_DUMP_TEMP_FILE or
    $TORCH_NCCL_DEBUG_INFO_TEMP_FILE, else the directory torch/ of $XDG_CACHE_HOME or ~/.cache. A
    rank that is frozen or gone writes none. There the ops have NCCL's names, the only ones that
    torch's analyser takes:

        python -m torch.distributed.flight_recorder.fr_trace -p gpumode_rank_ ~/.cache/torch

    Args:
        group: of this group only; None for all groups of this process.

    Returns:
        "entries", the oldest first, each with "process_group" (name and description),
        "profiling_name" ("gpumode:all_reduce"), "state" ("scheduled" behind another op, "started",
        "completed"), "input_sizes", "input_dtypes" and the like of the outputs,
        "collective_seq_id", "p2p_seq_id", "time_created_ns" (Unix time), "duration_ms" and others.
        Beyond torch's: "epoch" (which membership of the group), "attempt", "error" (of an op that
        failed), and of a collective that succeeded "straggler", the rank that entered it last, and
        "waited_ms", for how long after the first.
        "pg_config" has the members of each group, "pg_status" why it failed.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    record = pickle.loads(_backend.C.flight_record())
    if group is None:
        return record
    backend = backend_of(group)
    pg_id, name = backend.id(), backend.options.group_name
    record["entries"] = [entry for entry in record["entries"] if entry["pg_id"] == pg_id]
    record["pg_status"] = {pg_id: record["pg_status"][pg_id]}
    record["pg_config"] = {name: record["pg_config"][name]}
    return record


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for, in all recorded ops of one kind.

    Of each op it is the rank that came last, with the time for which the first one waited. So if
    several are late every time, each has a part of it.
    """

    rank: int
    """Of the group that was asked about."""
    op: str
    """"all_reduce", "barrier", ..."""
    count: int
    """How many times it came last."""
    waited: timedelta
    """In all."""
    longest: timedelta
    """The longest of these waits."""
    seq: int
    """The "collective_seq_id" of the longest."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was last in {self.op} {self.count} times: "
            f"{self.waited.total_seconds():.3f} s of waiting, at most "
            f"{self.longest.total_seconds():.3f} s (in op {self.seq})"
        )


def stragglers(group: dist.ProcessGroup | None = None) -> list[Straggler]:
    """Returns whom the ranks of the group waited for, the longest waits first.

    It is taken from the flight record of the group's present membership, which all ranks have
    alike but for the ops that are in flight; sends, receives and ops that failed do not count. No
    communication. Empty if TORCH_GPUMODE_FLIGHT_RECORD is 0.

    Args:
        group: the default group if None.

    Raises:
        ValueError: the group has no gpumode backend.
    """
    pg = group if group is not None else dist.group.WORLD
    entries = [e for e in flight_record(pg)["entries"] if e.get("straggler") is not None]
    epoch = max((entry["epoch"] for entry in entries), default=0)
    waits: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["epoch"] == epoch:
            op = entry["profiling_name"].removeprefix("gpumode:")
            waits.setdefault((entry["straggler"], op), []).append(entry)
    found = []
    for (rank, op), of_both in waits.items():
        worst = max(of_both, key=lambda entry: entry["waited_ms"])
        found.append(
            Straggler(
                rank=rank,
                op=op,
                count=len(of_both),
                waited=timedelta(milliseconds=sum(entry["waited_ms"] for entry in of_both)),
                longest=timedelta(milliseconds=worst["waited_ms"]),
                seq=worst["collective_seq_id"],
            )
        )
    return sorted(found, key=lambda straggler: straggler.waited, reverse=True)
