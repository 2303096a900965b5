"""Loads the compiled part, torch_gpumode._C, or says what to do."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPORTED_TORCH = ((2, 11), (2, 14))  # first and last minor version
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def build_info() -> dict[str, Any] | None:
    """Returns what setup.py wrote down when it built the extension for this Python.

    The keys are torch, compiler, cuda, why_not_cuda and architectures; None if there is no build.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = Path(__file__).with_name(f"_C{suffix}").with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else None


def problem() -> str | None:
    """Returns why the extension cannot work with this torch, and what to do; None if it can."""
    try:
        import torch
    except ImportError as error:
        return f"importing torch failed ({error}): install torch 2.11 to 2.14"
    info = build_info()
    if info is not None and minor(info["torch"]) == minor(torch.__version__):
        return None
    hidden = _hidden_installation()
    if hidden is not None:
        return (
            f"{Path(__file__).parent} is not built for this Python and torch, and hides what is "
            f"installed in {hidden}: run from another directory than the repository"
        )
    if info is None:
        return (
            f"torch_gpumode is not built for this Python: in its repository run "
            f"`make`, or `{REBUILD}`"
        )
    return (
        f"torch_gpumode was built for torch {info['torch']} and this is torch {torch.__version__}, "
        f"whose interfaces differ: rebuild it with `{REBUILD}`, or install the torch that it was "
        f"built for"
    )


def _hidden_installation() -> Path | None:
    """Returns where a built package lies that another torch_gpumode, earlier on the path, hides."""
    here = Path(__file__).parent
    for entry in sys.path:
        package = Path(entry or os.getcwd(), here.name).resolve()
        if package == here.resolve():
            continue
        if (package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
            return package
    return None


def minor(version: str) -> tuple[int, int]:
    """Returns (2, 14) for "2.14.1+cu130"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def load() -> ModuleType:
    """Returns torch_gpumode._C.

    Raises:
        ImportError: it is missing, was built for another torch, or does not load; the message
            says what to do.
    """
    reason = problem()
    if reason is not None:
        raise ImportError(reason)
    try:
        return importlib.import_module("torch_gpumode._C")
    except ImportError as error:
        raise ImportError(
            f"torch_gpumode's extension does not load ({error}): rebuild it with `{REBUILD}`"
        ) from error
