"""Shared by all tests."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from torch_gpumode import _autoload

sys.path.insert(0, str(Path(__file__).parent))  # so that tests/fault finds _ranks

# A group that fails writes its flight record to a file; not into the home of who runs the tests.
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = tempfile.mkdtemp(prefix="gpumode_flight_records_") + "/"

# torch's store client looks up the name of its peer. A resolver that does not answer, as behind
# some firewalls, would stop it for 5 s.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# Ranks are forked from this process, and OpenMP's threads do not survive a fork.
torch.set_num_threads(1)

# A build in place has no entry points.
_autoload.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs first what forks ranks: a child of a process whose autograd has threads has none."""

    def forks(item: pytest.Item) -> bool:
        known = vars(item.module) if isinstance(item, pytest.Function) else {}
        return any(getattr(each, "__module__", "") == "_ranks" for each in known.values())

    items.sort(key=lambda item: not forks(item))
