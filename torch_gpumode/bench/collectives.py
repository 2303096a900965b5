"""`bench collectives`: every collective through several backends, in nccl-tests' table."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from torch_gpumode.bench import footprint, table
from torch_gpumode.bench.cases import CASES, DTYPES, REDOPS, Call, Problem, num_wrong
from torch_gpumode.bench.ranks import new_group, run_ranks
from torch_gpumode.bench.timer import copy_call, time_alternately

_MIN_COPY_NBYTES = 2**20  # below, the time of copying is that of the call


def parse_size(text: str) -> int:
    """Bytes: a number with an optional K, M or G (powers of 1024), as nccl-tests reads it."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isascii() or not digits.isdigit() or unit not in ("", "K", "M", "G"):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 8, 64K or 128M")
    return int(digits) * 1024 ** " KMG".index(unit or " ")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _ops(text: str) -> list[str]:
    ops = text.split(",")
    for op in ops:
        if op not in CASES:
            raise argparse.ArgumentTypeError(f"{op!r} is none of {', '.join(CASES)}")
    return ops


def _backends(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    """nccl-tests' flags, and ours."""
    parser = argparse.ArgumentParser(
        prog="bench collectives", description="nccl-tests' table for several backends in one run"
    )
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default=8, help="first size (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=2**27, help="last size (default 128M)")
    add("-f", "--stepfactor", type=_positive, default=2, help="from size to size (default 2)")
    add("-n", "--iters", type=_positive, default=20, help="calls per round (default 20)")
    add("-w", "--warmup_iters", type=_positive, default=5, help="calls before (default 5)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="count wrong elements")
    add("-d", "--datatype", choices=DTYPES, default="float")
    add("-o", "--op", choices=REDOPS, default="sum", help="the reduction")
    add("-r", "--root", type=int, default=0)
    add("--rounds", type=_positive, default=5, help="times are medians over these (default 5)")
    add("--ranks", type=_positive, help="start that many (default 2); without torchrun only")
    add("--backends", type=_backends, default=["gloo", "gpumode"], help="the first is baseline")
    add("--ops", type=_ops, default=list(CASES), help="default: all")
    add("--csv", type=Path, help="append rows there")
    add("--footprint", action="store_true", help="memory and idle CPU time per rank instead")
    return parser


def main(argv: list[str], results: Path | None = None) -> int:
    """The command line. results: the folder whose files rows are appended to, without --csv.

    Returns the exit code: 1 if an element was wrong. SystemExit(2) for flags that are wrong.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        num_ranks = _num_ranks(arguments)
    except ValueError as error:
        parser.error(str(error))
    if results and not arguments.csv:
        arguments.csv = results / ("footprint.csv" if arguments.footprint else "collectives.csv")
    if arguments.footprint:
        return footprint.report(arguments.backends, num_ranks, arguments.csv)
    return max(run_ranks(_rank_main, num_ranks, arguments))


def _num_ranks(a: argparse.Namespace) -> int:
    """The number of ranks. Raises ValueError for flags that do not go together."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    num_ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else a.ranks or 2
    if under_torchrun and a.ranks:
        raise ValueError("--ranks is for a start without torchrun")
    if a.stepfactor < 2 or a.minbytes > a.maxbytes:
        raise ValueError("-f must be 2 or more, and -b at most -e")
    if not 0 <= a.root < num_ranks:
        raise ValueError(f"-r is {a.root}, but there are {num_ranks} ranks")
    if a.op == "avg" and not DTYPES[a.datatype].is_floating_point:
        raise ValueError(f"-o avg needs a floating-point type, not -d {a.datatype}")
    return num_ranks


def _rank_main(a: argparse.Namespace) -> int:
    control = dist.group.WORLD
    assert control is not None
    groups = {name: new_group(name) for name in a.backends}
    context = table.provenance()
    _say(f"# {control.size()} ranks on {context['cores']} cores ({context['cpu']})")
    _say(f"# torch {context['torch']}, commit {context['commit'] or '?'}, {context['date']}")
    _say(f"# {a.rounds} rounds of {a.iters} calls, backends alternate; medians over rounds")
    any_wrong = False
    for op in a.ops:
        _say(f"#\n{table.header(op, a.backends[0])}")
        size = a.minbytes
        while size <= a.maxbytes:
            rows = _measure(op, size, groups, control, a)
            for name in groups:
                pair = [rows.get((name, in_place)) for in_place in (False, True)]
                if any(pair):
                    _say(table.line(*pair))
            any_wrong |= any(row.wrong > 0 for row in rows.values())
            if a.csv and control.rank() == 0:
                table.append_csv(a.csv, (table.csv_row(row, context) for row in rows.values()))
            size *= a.stepfactor
    return int(any_wrong)


def _measure(
    op: str,
    size: int,
    groups: dict[str, dist.ProcessGroup],
    control: dist.ProcessGroup,
    a: argparse.Namespace,
) -> dict[tuple[str, bool], table.Row]:
    """Rows of one op at one size, by backend and in_place."""
    case, dtype, ranks = CASES[op], DTYPES[a.datatype], control.size()
    count = max(1, size // dtype.itemsize)
    if case.divides:
        count = max(1, count // ranks) * ranks
    rows = {}
    for in_place in (False, True):
        if not (case.in_place if in_place else case.out_of_place):
            continue
        calls, wrong = {}, {}
        for name, group in groups.items():
            problem = Problem(op, group, count, dtype, a.op, a.root, in_place, seed=size)
            call = case.make(problem)
            try:
                wrong[name] = _checked(call, a, control)
            except (RuntimeError, ValueError) as error:  # the same on all ranks
                _say(f"# {name}: {str(error).splitlines()[0]}")
                continue
            calls[name] = call.run
        if not calls:
            continue
        copied = max(count * dtype.itemsize, _MIN_COPY_NBYTES)
        seconds = time_alternately(
            {**calls, "copy": copy_call(copied)},
            iterations=a.iters,
            warmup=a.warmup_iters,
            rounds=a.rounds,
            control=control,
        )
        for name in calls:
            rows[name, in_place] = table.Row(
                op=op,
                backend=name,
                ranks=ranks,
                size=count * dtype.itemsize,
                count=count,
                type=a.datatype,
                redop=a.op if case.reduces else "none",
                root=a.root if case.rooted else -1,
                in_place=in_place,
                time_us=seconds[name] * 1e6,
                wrong=wrong[name],
                copy_gbs=2 * copied / seconds["copy"] / 1e9,
                baseline_us=seconds.get(a.backends[0], float("nan")) * 1e6,
            )
    return rows


def _checked(call: Call, a: argparse.Namespace, control: dist.ProcessGroup) -> int:
    """Runs a collective the first time; wrong elements over all ranks, -1 if not asked for."""
    if not a.check:
        call.run()
        return -1
    wrong = torch.tensor(num_wrong(call, exact=a.op != "avg"))
    dist.all_reduce(wrong, group=control)
    return int(wrong)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
