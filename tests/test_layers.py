"""Layers are what keeps this library small: reads every #include and import for arrows that run up.

The rule is in csrc/README.md and CONTRIBUTING.md; the tables here are its exact form.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder of csrc/ -> the folders that it may include, besides itself
CPP_LAYERS = {
    "core": set(),
    "host": {"core"},
    "gpu": {"core"},
    "symm": {"core", "gpu"},
    "optim": {"core", "gpu"},
    "c10d": {"core"},
    "ops": {"core", "optim"},
    "module.cpp": {"c10d", "ops", "optim", "symm"},
}
# file -> what it alone may include beyond that
CPP_EXCEPTIONS = {"c10d/engine_choice.cpp": {"host"}}
# The one header of symm, plain C++, that these may include.
SYMM_HEADER = "symm/copy.h"
MAY_USE_SYMM = {"c10d"}

SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

TORCH = r"torch/|ATen/|c10/|pybind11/"
CUDA = r"cuda|cooperative_groups|nvtx|c10/cuda/|ATen/cuda/"
NCCL = r"nccl"
# folder -> headers from outside that it must do without
CPP_FOREIGN = {
    "core": f"{TORCH}|{CUDA}|{NCCL}",
    "host": f"{TORCH}|{CUDA}|{NCCL}",
    "gpu": f"{TORCH}|{NCCL}",
    "symm": f"{TORCH}|{NCCL}",
    "optim": f"{CUDA}|{NCCL}",
    "c10d": f"{CUDA}|{NCCL}",
    "ops": f"{CUDA}|{NCCL}",
    "module.cpp": f"{CUDA}|{NCCL}",
}
IN_CU_FILES = f"{TORCH}|{NCCL}"
# Where a layer that does without CUDA's headers meets its kernels.
MAY_USE_CUDA = {"optim/arithmetic.h", "optim/cuda_batch.cpp", "optim/cuda_table.cpp"}

# module of torch_gpumode -> the modules that it may import, besides itself
PYTHON_LAYERS = {
    "__init__": set(),
    "config": set(),
    "_extension": set(),
    "_autoload": {"distributed"},
    "triton_kernels": set(),
    "distributed": {"_extension", "config"},
    "ops": {"_extension"},
    "optim": {"_extension"},
    "run": {"config"},
    "bench": {"_extension", "config", "distributed"},
    "env": {"_extension", "config"},
    "__main__": {"bench", "env"},
}


def cpp_violations(root: Path) -> list[str]:
    """Returns "file: what is wrong" for the sources under root/csrc."""
    found = []
    for path in sorted(p for p in (root / "csrc").rglob("*") if p.suffix in SUFFIXES):
        name = path.relative_to(root / "csrc").as_posix()
        layer = name.split("/")[0]
        if layer not in CPP_LAYERS:
            found.append(f"{name}: {layer} has no place in CPP_LAYERS")
            continue
        allowed = CPP_LAYERS[layer] | {layer} | CPP_EXCEPTIONS.get(name, set())
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M):
            first = header.split("/")[0]
            ours = "/" in header and first in CPP_LAYERS
            if header == SYMM_HEADER and layer in MAY_USE_SYMM:
                continue
            if ours and first not in allowed:
                found.append(f"{name}: includes {header}")
            foreign = IN_CU_FILES if path.suffix in (".cu", ".cuh") else CPP_FOREIGN[layer]
            if name in MAY_USE_CUDA and re.match(CUDA, header):
                continue
            if not ours and re.match(foreign, header):
                found.append(f"{name}: includes {header}")
            if header == "torch/extension.h" and name != "module.cpp":
                found.append(f"{name}: includes {header}, which costs a minute per file")
    return found


def imported_modules(source: str, package: str) -> set[str]:
    """Returns the modules of torch_gpumode that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("torch_gpumode.")}
    return found - {"__version__"}


def python_violations(root: Path) -> list[str]:
    """Returns "file: what is wrong" for the modules under root/torch_gpumode."""
    found = []
    for path in sorted((root / "torch_gpumode").rglob("*.py")):
        relative = path.relative_to(root)
        module = relative.parts[1].removesuffix(".py")
        if module not in PYTHON_LAYERS:
            found.append(f"{relative}: {module} has no place in PYTHON_LAYERS")
            continue
        allowed = PYTHON_LAYERS[module] | {module}
        imports = imported_modules(path.read_text(), ".".join(relative.parts[:-1]))
        found += [f"{relative}: imports {name}" for name in sorted(imports - allowed)]
    return found


def test_no_include_runs_up():
    assert len(list((ROOT / "csrc").rglob("*.h"))) > 10
    assert cpp_violations(ROOT) == []


def test_no_import_runs_up():
    assert len(list((ROOT / "torch_gpumode").rglob("*.py"))) > 5
    assert python_violations(ROOT) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("core/op.h", '#include "host/segment.h"'),
        ("core/op.h", "#include <torch/types.h>"),
        ("core/os/futex.h", "#include <cuda_runtime.h>"),
        ("host/segment.cpp", "#  include <c10/util/Half.h>"),
        ("host/segment.cpp", '#include "symm/copy.h"'),
        ("c10d/backend.cpp", '#include "host/segment.h"'),
        ("c10d/backend.cpp", "#include <ATen/cuda/CUDAContext.h>"),
        ("c10d/backend.cpp", "#include <torch/extension.h>"),
        ("symm/copy.cu", "#include <torch/extension.h>"),
        ("symm/copy.h", '#include "c10d/backend.h"'),
        ("optim/table.h", '#include "ops/optim.h"'),
        ("ops/optim.cpp", "#include <ATen/cuda/CUDAContext.h>"),
        ("surprise/new.h", '#include "core/op.h"'),
    ],
)
def test_catches_an_include_that_runs_up(tmp_path, name, line):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"#pragma once\n\n{line}\n")
    assert {violation.split(":")[0] for violation in cpp_violations(tmp_path)} == {name}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("c10d/engine_choice.cpp", '#include "host/segment.h"'),
        ("c10d/backend.cpp", '#include "symm/copy.h"'),
        ("module.cpp", "#include <torch/extension.h>"),
        ("module.cpp", '#include "optim/table.h"'),
        ("ops/optim.h", '#include "optim/rules.h"'),
        ("optim/adam.cu", "#include <cuda_runtime.h>"),
        ("symm/copy.cu", "#include <cuda_runtime.h>"),
    ],
)
def test_allows_an_include_that_does_not(tmp_path, name, line):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert cpp_violations(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("config.py", "import torch_gpumode.env"),
        ("distributed/_backend.py", "from torch_gpumode import env"),
        ("distributed/_backend.py", "from .. import bench"),
        ("distributed/_backend.py", "from ..bench import table"),
        ("distributed/_backend.py", "def f():\n    from torch_gpumode.bench.table import rows"),
        ("surprise.py", "import os"),
    ],
)
def test_catches_an_import_that_runs_up(tmp_path, name, line):
    path = tmp_path / "torch_gpumode" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert [v.split(":")[0] for v in python_violations(tmp_path)] == [f"torch_gpumode/{name}"]
