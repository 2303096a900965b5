"""What the build promises, as far as the sources show it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_setup_can_be_read_in_one_sitting():
    assert len((ROOT / "setup.py").read_text().splitlines()) <= 155


def test_setup_passes_no_flag_that_overrides_torch():
    """cpp_extension chooses -std, and stops choosing architectures when a flag names one."""
    flags = re.findall(r'"(-[^"]*)"', (ROOT / "setup.py").read_text())
    assert "-O3" in flags
    assert [flag for flag in flags if flag.startswith("-std") or "arch" in flag] == []


def test_torch_is_no_build_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == ["setuptools>=77"]


def test_both_entry_point_groups_name_the_same_function():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert groups["torch.backends"] == groups["torch.distributed.backends"]


def test_no_file_names_a_package_index():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = {name: (ROOT / name).read_bytes() for name in tracked if (ROOT / name).is_file()}
    option = b"index" + b"-url"
    assert [name for name, text in texts.items() if option in text] == []


def test_the_repository_is_not_tritons_package():
    """At the root `import triton_kernels` finds our folder, and says so."""
    result = subprocess.run(
        [sys.executable, "-c", "import triton_kernels"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "ImportError: this is the source folder of torch_gpumode" in result.stderr


def test_triton_kernels_is_installed_inside_the_package(tmp_path):
    code = "import torch_gpumode.triton_kernels as t; print(t.__name__)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "torch_gpumode.triton_kernels"


def test_importing_the_package_does_not_import_torch(tmp_path):
    """`import torch` imports it, and torch_gpumode.run keeps one small parent per rank."""
    code = "import sys, torch_gpumode, torch_gpumode.run; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_backend_is_known_without_an_import(tmp_path, autoload):
    code = (
        "import sys, torch.distributed as dist\n"
        "dist.init_process_group('gpumode', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )
    if autoload == "0" and not has_lazy_backends():
        pytest.skip("torch before 2.14 knows the entry-point group torch.backends only")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "gpumode", result.stderr


def has_lazy_backends() -> bool:
    import torch

    from torch_gpumode import _extension

    return _extension.minor(torch.__version__) >= (2, 14)


BREAK_REGISTRATION = """
import sys
class Breaker:  # makes registration fail while `import torch` is in its last lines
    def find_spec(self, name, path=None, target=None):
        if name == "torch_gpumode._autoload":
            import torch.distributed as dist
            def refuse(*args, **kwargs):
                raise RuntimeError("registration refused")
            dist.Backend.register_backend = refuse
sys.meta_path.insert(0, Breaker())
import torch
print("imported")
"""


@pytest.mark.parametrize("warnings", ["default", "error"])
def test_importing_torch_survives_a_failed_registration(tmp_path, warnings):
    result = subprocess.run(
        [sys.executable, "-W", f"{warnings}::RuntimeWarning", "-c", BREAK_REGISTRATION],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "imported", result.stderr
    if warnings == "default":
        assert "registration refused" in result.stderr
