"""The example: ranks are killed in their backward passes, the others train to the end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_through_failure.py"


def train(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    return subprocess.run(
        [*command, "-m", "torch_gpumode.run", str(EXAMPLE), *flags],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_survivors_finish_bit_identical(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    # With this seed the first of them is rank 0, which shows the progress.
    result = train(tmp_path, "--steps", "9", "--kills", "2", "--seed", "2", "--out", str(picture))
    assert result.returncode == 0, result.stderr
    assert "2 ranks hold bit-identical parameters and optimizer states" in result.stdout
    ms = re.findall(r"a rank killed in step (\d): .* (\d+) ms later", result.stdout)
    assert [step for step, _ in ms] == ["3", "6"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    curves = json.loads(picture.with_suffix(".json").read_text())
    assert list(curves["losses"]) == [str(step) for step in range(9)]
    assert curves["losses"]["8"] < curves["losses"]["0"] - 0.3


def test_refuses_to_kill_everybody(tmp_path: Path) -> None:
    result = train(tmp_path, "--kills", "4")
    assert result.returncode != 0
    assert "--kills must be 0 or more and below the number of ranks, 4" in result.stderr
