"""How much slower does torch_gpumode make `import torch`?

    python benchmarks/import_time.py [--rounds 15]

torch runs every entry point of the group `torch.backends` at the end of its import, ours among
them. Three ways to import it take turns, each in a new process: with our entry point; with the
same search for entry points, but ours hidden; and with torch's autoload switched off.
"""

import argparse
import os
import statistics
import subprocess
import sys

from tqdm import tqdm

TIME_IMPORT = """
import time
{before}
start = time.perf_counter()
import torch
print(time.perf_counter() - start)
"""
HIDE_OURS = """
import importlib.metadata as metadata
entry_points = metadata.entry_points
metadata.entry_points = lambda **kwargs: [e for e in entry_points(**kwargs) if e.name != "gpumode"]
"""
CHECK = "import torch; print('gpumode' in torch.distributed.Backend.backend_list)"


def import_s(before: str = "", autoload: str = "1") -> float:
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-c", TIME_IMPORT.format(before=before)]
    return float(subprocess.run(command, env=env, capture_output=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="import torch with and without our entry point")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    registered = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, check=True)
    if registered.stdout.strip() != b"True":
        sys.exit("torch_gpumode is not installed here: its entry point is not found")

    ways = {
        "with ours": lambda: import_s(),
        "ours hidden": lambda: import_s(before=HIDE_OURS),
        "autoload off": lambda: import_s(autoload="0"),
    }
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(rounds)):
        for name, way in ways.items():
            times_ms[name].append(1e3 * way())

    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    for name, median in medians.items():
        added = medians["with ours"] - median
        print(f"{name:>12}: {median:7.1f} ms median, {min(times_ms[name]):7.1f} ms best", end="")
        print(f", ours adds {added:.1f} ms" if name != "with ours" else "")


if __name__ == "__main__":
    main()
