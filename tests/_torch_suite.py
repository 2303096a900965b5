"""Runs the distributed tests that come with torch on CPU ranks; test_torch_distributed.py's part.

    python tests/_torch_suite.py gpumode|as_gloo|gloo NUMBER_OF_RANKS [name of a test ...]

"gloo" is torch's own backend, "as_gloo" ours under its name, since torch gates some tests on that.
Prints a line of JSON: the names of the tests that passed, of those that were skipped, the output of
each that failed, and the seconds that each took.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

MODE, SIZE, ONLY = sys.argv[1], sys.argv[2], sys.argv[3:]
NAME = "gpumode" if MODE == "gpumode" else "gloo"
folder = tempfile.TemporaryDirectory()
Path(folder.name, "barrier").mkdir()
os.environ |= {"BACKEND": NAME, "WORLD_SIZE": SIZE, "TEMP_DIR": folder.name}
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (else each forked rank imports it)
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

if MODE == "gpumode":
    for feature in ("ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(NAME)

# Else all ranks open a group before they find that the test wants a GPU, or 8 ranks.
for_gpus = unittest.skip("needs a GPU")
common_distributed.skip_if_no_gpu = for_gpus
common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: for_gpus
if int(SIZE) < 8:
    common_distributed.skip_if_small_worldsize = unittest.skip("needs 8 ranks")

# Its decorators read the environment and the features when it is imported.
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from torch_gpumode import _autoload  # noqa: E402
from torch_gpumode.distributed import _backend  # noqa: E402

torch.set_num_threads(1)
_autoload.register()


class OursAsGloo(_backend.C.Backend):
    """Stands where torch makes its ProcessGroupGloo, for groups of that name."""

    def __init__(self, store: dist.Store, rank: int, size: int, **kwargs: Any) -> None:
        options = _backend.C.Options(kwargs["timeout"])
        super().__init__(store, rank, size, options)


if MODE == "as_gloo":
    distributed_c10d.ProcessGroupGloo = OursAsGloo
    _find_events = distributed_test.get_profiling_event

    def _find_events_of_gloo(name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The labels in a profile carry the name of the backend itself."""
        events = _find_events(name.replace("gloo:", "gpumode:"), *args, **kwargs)
        for event in events:
            event.name = event.name.replace("gpumode:", "gloo:")
        return events

    distributed_test.get_profiling_event = _find_events_of_gloo


def _sleep(seconds: float) -> None:
    """Polls of 0.1 s, for arrivals and exits, are most of what the suite does otherwise."""
    time.sleep(0.01 if seconds == 0.1 else seconds)


for module in (common_distributed, distributed_test):
    module.time = types.SimpleNamespace(**(vars(time) | {"sleep": _sleep}))


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main() -> None:
    names = ONLY or unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    seconds: dict[str, float] = {}
    result = unittest.TestResult()
    for name in names:
        began = time.monotonic()
        TorchSuite(name).run(result)
        seconds[name] = round(time.monotonic() - began, 3)
    problems = {test._testMethodName: text for test, text in result.failures + result.errors}
    skipped = {test._testMethodName: why for test, why in result.skipped}
    passed = [name for name in names if name not in skipped and name not in problems]
    summary = {"passed": passed, "skipped": skipped, "failed": problems, "seconds": seconds}
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
