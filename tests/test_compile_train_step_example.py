"""The example of a compiled train step learns, in one graph that is compiled once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "compile_train_step.py"


def test_it_learns():
    spec = importlib.util.spec_from_file_location("compile_train_step", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.train(backend="aot_eager") < 0.1
