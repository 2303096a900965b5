"""How much slower does torch_gpumode make `import torch`?

    python benchmarks/import_time.py [--rounds 15]

torch runs every entry point of the group `torch.backends` at the end of its import, ours among
them. Three ways to import it take turns, each in a new process: with our entry point; with the
same search for entry points, but ours hidden; and with torch's autoload switched off. What ours
adds is the median over rounds of the difference within a round, in wall time and in CPU time,
which other work on the machine disturbs less.
"""

import argparse
import os
import statistics
import subprocess
import sys

from tqdm import tqdm

from torch_gpumode.bench import table

TIME_IMPORT = """
import time
{before}
wall, cpu = time.perf_counter(), time.process_time()
import torch
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
HIDE_OURS = """
import importlib.metadata as metadata
entry_points = metadata.entry_points
metadata.entry_points = lambda **kwargs: [e for e in entry_points(**kwargs) if e.name != "gpumode"]
"""
CHECK = "import torch; print('gpumode' in torch.distributed.Backend.backend_list)"


def import_ms(before: str = "", autoload: str = "1") -> tuple[float, float]:
    """Wall and CPU time of `import torch`, in milliseconds."""
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-c", TIME_IMPORT.format(before=before)]
    output = subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout
    wall, cpu = map(float, output.split())
    return 1e3 * wall, 1e3 * cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="import torch with and without our entry point")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    registered = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, check=True)
    if registered.stdout.strip() != b"True":
        sys.exit("torch_gpumode is not installed here: its entry point is not found")

    ways = {
        "with ours": lambda: import_ms(),
        "ours hidden": lambda: import_ms(before=HIDE_OURS),
        "autoload off": lambda: import_ms(autoload="0"),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in tqdm(range(rounds), unit="round"):
        for name, way in ways.items():
            times[name].append(way())

    rows = []
    for name in ways:
        row: list[object] = [name]
        for clock in range(2):
            mine = [time[clock] for time in times[name]]
            ours = [time[clock] for time in times["with ours"]]
            added = statistics.median(b - a for a, b in zip(mine, ours, strict=True))
            row += [f"{statistics.median(mine):.1f}", f"{added:.1f}"]
        rows.append(row)
    print(table.plain_table(["import torch", "wall ms", "ours adds", "CPU ms", "ours adds"], rows))


if __name__ == "__main__":
    main()
