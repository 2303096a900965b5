import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_gpumode import _extension, env


@pytest.fixture
def build_of(monkeypatch):
    """Pretends that the extension was built for another torch, or not at all (None)."""

    def pretend(torch_version: str | None) -> None:
        info = _extension.build_info()
        assert info is not None
        there = None if torch_version is None else info | {"torch": torch_version}
        monkeypatch.setattr(_extension, "build_info", lambda: there)
        _extension.load.cache_clear()

    yield pretend
    _extension.load.cache_clear()


def test_a_working_installation_has_no_problem():
    report = env.collect({})
    assert report.problems == []
    names = [name for name, _ in report.lines]
    for name in ("torch_gpumode", "python", "torch", "built for", "compiler", "CUDA build", "NCCL"):
        assert name in names


def test_the_command_succeeds_and_tests_two_ranks(tmp_path):
    command = [sys.executable, "-m", "torch_gpumode", "env"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok: 2 ranks all-reduced" in result.stdout


def test_an_unknown_variable_is_a_problem_that_names_the_near_match():
    report = env.collect({"TORCH_GPUMODE_SPINUS": "10"})
    assert len(report.problems) == 1
    assert "did you mean TORCH_GPUMODE_SPIN_US:" in report.problems[0]


@pytest.mark.parametrize(
    ("built_for", "sentence"),
    [
        (None, "not built for this Python: .*`make`"),
        ("2.3.0", r"built for torch 2\.3\.0 .*rebuild"),
    ],
)
def test_a_build_that_does_not_fit_is_a_problem_that_says_what_to_do(build_of, built_for, sentence):
    build_of(built_for)
    with pytest.raises(ImportError, match=sentence):
        _extension.load()
    report = env.collect({})
    assert len(report.problems) == 1
    assert re.search(sentence, report.problems[0])


def test_a_patch_release_of_torch_fits(build_of):
    major, minor = _extension.minor(torch.__version__)
    build_of(f"{major}.{minor}.99+other")
    assert _extension.problem() is None


def test_an_extension_that_does_not_load_is_told_with_what_to_do(monkeypatch):
    def refuse(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    _extension.load.cache_clear()
    monkeypatch.setattr(_extension.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=r"undefined symbol: _ZN3c10.*rebuild it with"):
        _extension.load()


def test_a_torch_that_is_not_supported_is_a_problem(monkeypatch):
    monkeypatch.setattr(_extension, "SUPPORTED_TORCH", ((2, 1), (2, 2)))
    assert any("not supported: install one" in problem for problem in env.collect({}).problems)


def test_two_nccls_are_a_problem(monkeypatch):
    monkeypatch.setattr(env, "_is_installed", lambda name: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert any("more than one NCCL" in problem for problem in env.collect({}).problems)


def test_loaded_libraries_finds_what_is_mapped():
    assert any(
        path.name.startswith("libtorch_cpu") for path in env.loaded_libraries("libtorch_cpu")
    )
    assert env.loaded_libraries("libno_such_library") == []


@pytest.mark.parametrize(
    ("rank_code", "sentence"),
    [
        ("raise RuntimeError('no memory left')", "rank 0: RuntimeError: no memory left"),
        ("import time; time.sleep(60)", "rank 0: did not finish in time"),
        ("import os; os._exit(3)", "rank 0: exit code 3"),
    ],
)
def test_a_self_test_that_fails_is_a_problem(monkeypatch, rank_code, sentence):
    popen = subprocess.Popen

    def replace_code(command: list[str], **kwargs: object) -> "subprocess.Popen[str]":
        return popen([*command[:2], rank_code], **kwargs)

    monkeypatch.setattr(env.subprocess, "Popen", replace_code)
    report = env.Report()
    env.self_test(report, timeout_s=5.0)
    assert len(report.problems) == 1
    assert sentence in report.problems[0]


def test_build_info_is_what_setup_wrote():
    path = next(Path(env.__file__).parent.glob("_C.*.json"))
    assert set(json.loads(path.read_text())) == {
        "torch", "compiler", "cuda", "why_not_cuda", "architectures",
    }  # fmt: skip
    assert _extension.build_info()["torch"] == torch.__version__
