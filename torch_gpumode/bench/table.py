"""Rows of measurements: nccl-tests' table for people, CSV for later."""

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import torch_gpumode
from torch_gpumode.bench import floor


@dataclass(frozen=True)
class Row:
    """One collective at one size through one backend, in place or not."""

    op: str
    backend: str
    ranks: int
    size: int  # bytes, as nccl-tests counts them (see floor.py)
    count: int  # elements
    type: str
    redop: str  # "none" where nothing is reduced
    root: int  # -1 where there is none
    in_place: bool
    time_us: float
    wrong: int  # elements, summed over ranks; -1: not checked
    copy_gbs: float  # bytes read + written per second by one rank while all ranks copy
    baseline_us: float  # the same op and size through the first backend, in the same rounds

    @property
    def algbw(self) -> float:
        """GB/s."""
        return self.size / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """GB/s."""
        return self.algbw * floor.busbw_factor(self.op, self.ranks)

    @property
    def floor_us(self) -> float:
        nbytes = floor.floor_nbytes(self.op, self.ranks, self.size, in_place=self.in_place)
        return nbytes / self.copy_gbs / 1e3

    @property
    def speedup(self) -> float:
        return self.baseline_us / self.time_us


def provenance() -> dict[str, str | int]:
    """What a number means nothing without: date, commit, versions, machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "torch_gpumode": torch_gpumode.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _commit() -> str:
    """The commit of the checkout that this is, with + if it was changed; "" if it is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + "+" * bool(changed)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def append_csv(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Appends rows to a CSV file, floats with six digits; an existing one must have their columns.

    Raises:
        ValueError: they are not; nothing was written.
    """
    rows = list(rows)
    if not rows:
        return
    columns = list(rows[0])
    old = path.read_text() if path.exists() else ""
    if old and old.splitlines()[0].split(",") != columns:
        raise ValueError(f"{path} has other columns than the rows that are to be added")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not old:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def csv_row(row: Row, context: dict[str, str | int]) -> dict[str, object]:
    derived = {name: getattr(row, name) for name in ("algbw", "busbw", "floor_us", "speedup")}
    return {**context, **asdict(row), **derived}


# nccl-tests' columns, between the backend in front and what is ours at the end: name, unit, width.
_LEFT = [
    ("backend", "", 10),
    ("size", "(B)", 11),
    ("count", "(elements)", 12),
    ("type", "", 8),
    ("redop", "", 6),
    ("root", "", 6),
]
_TIMES = [("time", "(us)", 8), ("algbw", "(GB/s)", 6), ("busbw", "(GB/s)", 6), ("#wrong", "", 6)]
_RIGHT = [("copy", "(GB/s)", 6), ("floor", "(us)", 8), ("x floor", "", 7), ("speedup", "", 7)]
_COLUMNS = [*_LEFT, *_TIMES, *_TIMES, *_RIGHT]
_MIN_FLOOR_US = 1.0  # below, a call costs more than its bytes


def header(op: str, baseline: str) -> str:
    """What stands above the lines of one collective."""
    place = _width(_TIMES)
    lines = [
        f"{'':{_width(_LEFT)}}  {'out-of-place':^{place}}  {'in-place':^{place}}",
        _join([name for name, _, _ in _COLUMNS]),
        _join([unit for _, unit, _ in _COLUMNS]),
    ]
    title = f"# {op}: x floor and speedup (over {baseline}) are in-place if there is one"
    return "\n".join([title, *(f"#{line[1:]}".rstrip() for line in lines)])


def line(out_of_place: Row | None, in_place: Row | None) -> str:
    """A line of the table, of one backend at one size; at least one of the two is there."""
    row = in_place or out_of_place
    assert row is not None
    cells: list[object] = [row.backend, row.size, row.count, row.type, row.redop, row.root]
    cells += _times(out_of_place) + _times(in_place)
    floor_us = row.floor_us
    x_floor = f"{row.time_us / floor_us:.2f}" if floor_us >= _MIN_FLOOR_US else "-"
    cells += [f"{row.copy_gbs:.2f}", _us(floor_us), x_floor, f"{row.speedup:.2f}"]
    return _join(cells)


def _times(row: Row | None) -> list[object]:
    if row is None:
        return ["N/A"] * len(_TIMES)
    wrong = "N/A" if row.wrong < 0 else row.wrong
    return [_us(row.time_us), f"{row.algbw:.2f}", f"{row.busbw:.2f}", wrong]


def _us(value: float) -> str:
    digits = 2 if value < 1e4 else 1 if value < 1e5 else 0
    return f"{value:.{digits}f}"


def _width(columns: list[tuple[str, str, int]]) -> int:
    return sum(width for _, _, width in columns) + 2 * (len(columns) - 1)


def _join(cells: Sequence[object]) -> str:
    return "  ".join(
        f"{cell!s:>{width}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True)
    )


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Right-aligned columns under their names, floats with three digits."""
    cells = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row]
        for row in rows
    ]
    lines = [list(columns), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
