"""The example of a fused optimizer learns, whichever way it makes its steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "fused_optimizer.py"


def test_it_learns():
    spec = importlib.util.spec_from_file_location("fused_optimizer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.train() < 0.1
    assert example.train_attached() < 0.1
