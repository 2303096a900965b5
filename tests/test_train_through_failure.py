"""The example: a rank is killed in its backward pass, the others agree and train to the end."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_gpumode.bench import ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_through_failure.py"


def test_survivors_finish_bit_identical(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    flags = ["--steps", "9", "--kill-at", "4", "--out", str(picture)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    result = subprocess.run(
        [*command, "-m", "torch_gpumode.run", str(EXAMPLE), *flags],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert "3 ranks hold bit-identical parameters and optimizer states" in result.stdout
    assert "backward() raised PeerLost" in result.stdout
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+)$", result.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "2", "3"]
    for row in rows:
        raised, rebuilt, resumed = map(float, row[1:])
        assert 0 < raised < rebuilt < resumed
    assert picture.read_bytes().startswith(b"\x89PNG")


def agree(steps: list[int]) -> tuple[int, bool]:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["example"] = example
    spec.loader.exec_module(example)

    def model_at(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(step):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = model_at(steps[dist.get_rank()])
    step = example.agree_on_state(model, optimizer, steps[dist.get_rank()])
    right = zip(
        example.state_of(model, optimizer), example.state_of(*model_at(max(steps))), strict=True
    )
    return step, all(torch.equal(a, b) for a, b in right)


@pytest.mark.parametrize("steps", [[5, 5, 5], [4, 5, 4], [5, 4, 5]])
def test_who_is_behind_takes_the_state_of_who_is_ahead(steps: list[int]) -> None:
    assert ranks.run_ranks(agree, 3, steps) == [(5, True)] * 3
