"""Draws what `optim_gpu.py --json` has written: how near to a copy of as many bytes each step is.

python benchmarks/optim_chart.py shapes.json kinds.json clip.json --out benchmarks/results/optim.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WAYS = {"ours": "tab:blue", "compile": "tab:green", "fused": "tab:orange", "foreach": "tab:gray"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of optim_gpu.py")
    parser.add_argument("--out", type=Path, default=Path("optim.png"))
    args = parser.parse_args()
    bars: list[tuple[float, str, float]] = []  # where, whose, how long
    titles: dict[float, str] = {}
    place = 0.0
    for path in args.results:
        for title, ways in json.loads(path.read_text()).items():
            # Where most of the time is not memory's, a fraction of it says nothing.
            if "copy" not in ways or ways["ours"]["gpu"] < 100e-6:
                continue
            found = [way for way in WAYS if way in ways]
            titles[place + (len(found) - 1) / 2] = title
            bars += [(place + i, way, ways[way]["of copy"]) for i, way in enumerate(found)]
            place += len(found) + 0.7

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.13 * place + 1), layout="constrained")
    for way, color in WAYS.items():
        of_way = [(where, length) for where, whose, length in bars if whose == way]
        if of_way:
            places, lengths = zip(*of_way, strict=True)
            drawn = axes.barh(places, lengths, height=1.0, color=color, label=way)
            axes.bar_label(drawn, fmt="%.2f", fontsize=6, padding=2)
    axes.set_yticks(list(titles), list(titles.values()), fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("of a copy of as many bytes (more is faster)")
    axes.legend(loc="lower left", ncols=len(WAYS), bbox_to_anchor=(0.0, 1.0), frameon=False)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
