"""Measuring: what the programs in benchmarks/ and `python -m torch_gpumode bench` are made of.

    ranks.py        start N ranks on this host
    timer.py        time several contenders alternately, in one run
    cases.py        the collectives: how to call each one and what must come out
    floor.py        bus bandwidth, and the bytes that a collective must move
    table.py        rows: nccl-tests' table, and CSV
    footprint.py    memory of a rank, and CPU time of a waiting one
    collectives.py  the command line that puts them together

Times are medians over rounds, and every ratio is between contenders of the same rounds.
"""

import sys


def main(argv: list[str]) -> int:
    """`python -m torch_gpumode bench ...`; the exit code."""
    if argv[:1] != ["collectives"]:
        print("usage: python -m torch_gpumode bench collectives [--help]", file=sys.stderr)
        return 2

    from torch_gpumode.bench import collectives

    return collectives.main(argv[1:])
