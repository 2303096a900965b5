"""Runs the distributed tests that come with torch on 2 CPU ranks; test_torch_distributed.py's part.

    python tests/_torch_suite.py gpumode|gloo [name of a test ...]

"gloo" means our backend under gloo's name, since torch gates some tests on it. Prints a line of
JSON: the names of the tests that passed, how many were skipped, and the output of each that failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

NAME, ONLY = sys.argv[1], sys.argv[2:]
folder = tempfile.TemporaryDirectory()
Path(folder.name, "barrier").mkdir()
os.environ |= {"BACKEND": NAME, "WORLD_SIZE": "2", "TEMP_DIR": folder.name}

import torch  # noqa: E402  (torch's tests read the environment when they are imported)
import torch._dynamo  # noqa: E402  (else each forked rank imports it)
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from torch_gpumode import _autoload  # noqa: E402

torch.set_num_threads(1)
_autoload.register()
for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add(NAME)
if NAME == "gloo":
    dist.Backend._plugins["GLOO"] = dist.Backend._plugins["GPUMODE"]
    _find_events = distributed_test.get_profiling_event

    def _find_events_of_gloo(name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The labels in a profile carry the name of the backend itself."""
        events = _find_events(name.replace("gloo:", "gpumode:"), *args, **kwargs)
        for event in events:
            event.name = event.name.replace("gpumode:", "gloo:")
        return events

    distributed_test.get_profiling_event = _find_events_of_gloo


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main() -> None:
    names = ONLY or unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    result = unittest.TestResult()
    unittest.TestSuite(map(TorchSuite, names)).run(result)
    problems = {test._testMethodName: text for test, text in result.failures + result.errors}
    skipped = {test._testMethodName for test, _ in result.skipped}
    passed = [name for name in names if name not in skipped and name not in problems]
    summary = {"passed": passed, "skipped": len(skipped), "failed": problems}
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
