"""Every TORCH_GPUMODE_* environment variable, and nothing else that configures the library."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PREFIX = "TORCH_GPUMODE_"


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _microseconds(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 60_000_000:
        raise ValueError("must be a whole number of microseconds, 0 to a minute")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 100_000:
        raise ValueError("must be a whole number, 0 to 100000")
    return int(text)


def _setting(parse: Callable[[str], Any]) -> Any:
    return field(default=None, metadata={"parse": parse})


@dataclass(frozen=True)
class Config:
    """The settings. None means that the variable is not set.

    The field `spin_us` is read from TORCH_GPUMODE_SPIN_US, and so on.
    """

    cuda: bool | None = _setting(_flag)
    """When building only: compile the .cu files (1, and fail if that is impossible) or not (0).
    Default: compile them if torch has CUDA and nvcc is there."""

    flight_record: int | None = _setting(_count)
    """How many of its last ops each group remembers, and writes to a file when it fails (of all
    groups together at most the last 20,000); 0 does neither. Default: 1000."""

    spin_us: int | None = _setting(_microseconds)
    """How long a waiting rank polls before it sleeps, in microseconds. Polling longer shortens
    the latency of small collectives and takes time from whatever shares the core; 0 sleeps at
    once. Default: 50, and 0 where ranks share cores."""


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Reads the settings.

    Args:
        environ: the variables to read.

    Raises:
        ValueError: a variable has a value that it cannot have, or begins with TORCH_GPUMODE_ and
            is not known; the message names it, and the known one that looks most like it.
    """
    unknown = unknown_variables(environ)
    if unknown:
        raise ValueError("; ".join(unknown.values()))
    values = {}
    for setting in fields(Config):
        name = PREFIX + setting.name.upper()
        if name in environ:
            try:
                values[setting.name] = setting.metadata["parse"](environ[name])
            except ValueError as error:
                raise ValueError(f"{name}={environ[name]!r} {error}") from None
    return Config(**values)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what is wrong with each TORCH_GPUMODE_* variable that nobody reads."""
    known = [setting.name.upper() for setting in fields(Config)]
    messages = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = "did you mean" if near else "known are"
            names = ", ".join(PREFIX + name for name in near or known)
            messages[variable] = f"{variable} is not a known variable; {hint} {names}"
    return messages
