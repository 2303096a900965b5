"""The distributed tests that come with torch, on 2 CPU ranks, with our backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# torch tells the name of a backend outside its tree as "custom" there.
INHERENT = {"test_ddp_logging_data_cpu"}
# Tests of how Gloo words its errors, of its own settings, and of what we refuse: sparse tensors.
GLOO_ONLY = {
    "test_barrier_timeout_full_group",
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_sparse_all_reduce_sum",
}


def run_suite(name: str) -> dict:
    script = Path(__file__).with_name("_torch_suite.py")
    done = subprocess.run(
        [sys.executable, str(script), name], capture_output=True, text=True, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"passed"')]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1])


def test_under_our_name():
    result = run_suite("gpumode")
    unexpected = {name: text for name, text in result["failed"].items() if name not in INHERENT}
    assert not unexpected, "\n".join(unexpected.values())
    assert len(result["passed"]) >= 60


@pytest.mark.skipif(
    torch.__version__ < "2.14", reason="Gloo's creator cannot be replaced before torch 2.14"
)
def test_under_the_name_of_gloo():
    """torch runs some of its tests for Gloo only, such as those of profiling and timeouts."""
    result = run_suite("gloo")
    unexpected = {name: text for name, text in result["failed"].items() if name not in GLOO_ONLY}
    assert not unexpected, "\n".join(unexpected.values())
    assert len(result["passed"]) >= 80
