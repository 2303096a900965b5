"""The distributed tests that come with torch, with our backend: what Gloo passes, passes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

# torch's DDP logger calls any backend from outside its tree "custom", and takes one that it knows
# as "gloo" for an object of its own class, from which it reads a number of threads.
INHERENT = {"test_ddp_logging_data_cpu"}


@functools.cache
def run_suite(mode: str, size: int, *names: str) -> dict:
    script = Path(__file__).with_name("_torch_suite.py")
    done = subprocess.run(
        [sys.executable, str(script), mode, str(size), *names],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"passed"')]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1])


def passed(mode: str, size: int, *names: str) -> set[str]:
    """Returns the names of the tests that passed, if none failed."""
    result = run_suite(mode, size, *names)
    unexpected = {name: text for name, text in result["failed"].items() if name not in INHERENT}
    assert not unexpected, "\n".join(unexpected.values())
    return set(result["passed"])


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_under_our_name(size):
    assert len(passed("gpumode", size)) >= 60


def test_for_gloo_only():
    """What torch skips under our name, such as tests of profiling and timeouts."""
    skipped = run_suite("gpumode", 2)["skipped"]
    assert len(passed("as_gloo", 2, *skipped)) >= 20


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_beside_gloo(size):
    """Some of torch's tests want 8 ranks."""
    of_gloo = run_suite("gloo", size)
    assert not of_gloo["failed"]
    assert set(of_gloo["passed"]) - passed("as_gloo", size) <= INHERENT
