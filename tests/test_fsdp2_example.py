"""The FSDP2 example learns, and goes on from its checkpoint with another number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "fsdp2.py"


def train(ranks: int, *flags: str) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    result = subprocess.run(
        [*command, str(EXAMPLE), *flags], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    found = re.search(rf"{ranks} ranks: loss (\d+\.\d+) at the end", result.stdout)
    assert found, result.stdout
    return float(found[1])


def test_it_learns_and_goes_on(tmp_path: Path) -> None:
    out = str(tmp_path / "checkpoint")
    train(3, "--out", out, "--steps", "30")
    resumed = train(2, "--out", out, "--resume", "--steps", "5")
    assert resumed == pytest.approx(train(3, "--steps", "35"), rel=1e-3)
    assert resumed < 0.1
