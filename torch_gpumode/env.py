"""What `python -m torch_gpumode env` reports: versions, how we were built, and a self-test.

Each finding is a line; each problem is a sentence that says what to do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch_gpumode
from torch_gpumode import _extension, config

# Of the self-test. Two cold imports of torch on a busy disk are the longest part.
SELF_TEST_TIMEOUT_S = 120.0


@dataclass
class Report:
    """Lines as (name, text), and the problems among them."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        text = [f"{name:<{width}}  {text}" for name, text in self.lines]
        text += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join(text)


def main() -> int:
    """Prints the report; returns 1 when something would not work, else 0."""
    report = collect()
    if not report.problems:
        self_test(report)
    print(report)
    return 1 if report.problems else 0


def collect(environ: Mapping[str, str] = os.environ) -> Report:
    """Looks at everything that can be looked at without starting a process group."""
    report = Report()
    report.add("torch_gpumode", f"{torch_gpumode.__version__} in {Path(__file__).parent}")
    report.add("python", f"{platform.python_version()} {sys.executable}")
    report.add("system", f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores")
    _variables(report, environ)
    reason = _extension.problem()
    if reason is not None:
        report.problems.append(reason)
    _build(report)
    try:
        import torch
    except ImportError:
        report.add("torch", "not importable")
        return report
    report.add("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    first, last = _extension.SUPPORTED_TORCH
    if not first <= _extension.minor(torch.__version__) <= last:
        report.problems.append(
            f"torch {torch.__version__} is not supported: install one from "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        )
    _devices(report)
    _nccl(report)
    if reason is None:
        try:
            _extension.load()
        except ImportError as error:
            report.problems.append(str(error))
    return report


def _variables(report: Report, environ: Mapping[str, str]) -> None:
    for name in sorted(name for name in environ if name.startswith(config.PREFIX)):
        report.add("variable", f"{name}={environ[name]}")
    try:
        config.load(environ)
    except ValueError as error:
        report.problems.append(f"{error}: correct it or unset it")


def _build(report: Report) -> None:
    info = _extension.build_info()
    if info is None:
        return
    report.add("built for", f"torch {info['torch']}")
    report.add("compiler", info["compiler"])
    if info["cuda"]:
        report.add("CUDA build", f"yes, nvcc {info['cuda']}")
        report.add("architectures", info["architectures"])
    else:
        report.add("CUDA build", f"no: {info['why_not_cuda']}")


def _devices(report: Report) -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        report.add(
            f"cuda:{index}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB",
        )
    if torch.cuda.device_count() == 0:
        report.add("devices", "no GPU; everything that needs none works")


def _nccl(report: Report) -> None:
    import torch

    if torch.version.cuda is None:
        report.add("NCCL", "none in this torch")
        return
    compiled = ".".join(map(str, torch.cuda.nccl.version()))
    paths = loaded_libraries("libnccl.so")
    loaded = [f"{nccl_version(path)} from {path}" for path in paths]
    report.add("NCCL", f"torch compiled with {compiled}, loaded {', '.join(loaded) or 'none'}")
    wheels = sorted(
        name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if _is_installed(name)
    )
    if len(paths) > 1 or len(wheels) > 1:
        copies = ", ".join(map(str, paths if len(paths) > 1 else wheels))
        report.problems.append(
            f"there is more than one NCCL ({copies}), and torch may use the wrong one: uninstall "
            f"the wheel that this torch (CUDA {torch.version.cuda}) does not need, and unset "
            f"LD_LIBRARY_PATH and LD_PRELOAD entries that name another"
        )


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def loaded_libraries(name: str) -> list[Path]:
    """Returns the files mapped into this process whose name begins with `name`."""
    maps = Path("/proc/self/maps").read_text()
    pattern = rf"^.* (/.*/{re.escape(name)}[^/\n]*)$"
    return [Path(path) for path in sorted(set(re.findall(pattern, maps, re.MULTILINE)))]


def nccl_version(path: Path) -> str:
    """Returns the version of a loaded NCCL, such as "2.30.7"."""
    code = ctypes.c_int()
    ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def self_test(report: Report, timeout_s: float = SELF_TEST_TIMEOUT_S) -> None:
    """Lets two processes of this machine all-reduce over the backend, within `timeout_s`."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        code = "from torch_gpumode import env; env.self_test_rank({rank}, {folder!r}, {timeout})"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code.format(rank=rank, folder=folder, timeout=timeout_s)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        failures = [
            f"rank {rank}: {failure}"
            for rank, process in enumerate(ranks)
            if (failure := _failure(process, start + timeout_s)) is not None
        ]
    if failures:
        report.add("self-test", "failed")
        report.problems.append(
            f"two ranks on this machine could not all-reduce ({'; '.join(failures)}): if the "
            f"message does not say what to do, please report it with this output"
        )
    else:
        seconds = time.monotonic() - start
        report.add("self-test", f"ok: 2 ranks all-reduced on cpu ({seconds:.1f} s with start-up)")


def _failure(process: subprocess.Popen[str], deadline: float) -> str | None:
    """Returns the last line that a rank wrote, or why there is none; None if it succeeded."""
    try:
        _, stderr = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "did not finish in time"
    if process.returncode == 0:
        return None
    return (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def self_test_rank(rank: int, folder: str, timeout_s: float) -> None:
    """What each process of the self-test runs. Raises unless the sum is right."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gpumode",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )
    values = torch.arange(1000, dtype=torch.float32) + rank
    dist.all_reduce(values)
    torch.testing.assert_close(values, 2 * torch.arange(1000, dtype=torch.float32) + 1)
    dist.destroy_process_group()
