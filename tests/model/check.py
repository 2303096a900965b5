"""Check commit.pml with Spin: the protocol holds as built, and fails without each condition.

python tests/model/check.py            # what CI runs
python tests/model/check.py --large    # minutes and gigabytes
python tests/model/check.py --trace "without 7"    # one row, and the steps to its violation
"""

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("commit.pml")
HOLDS = "holds"
ENDS = "no cycle"
STUCK = "T"


@dataclass(frozen=True)
class Row:
    name: str
    expected: str  # HOLDS, ENDS, or the property that is violated
    defines: str = ""
    covers: bool = False  # every statement and every kind of event must be reached


@dataclass
class Result:
    found: str
    states: int
    depth: int
    megabytes: float
    seconds: float
    output: str


def _bounds(n: int, k: int, crashes: int, timeouts: int, hurries: int, window: int = 1) -> str:
    return (
        f"-DN={n} -DK={k} -DCRASHES={crashes} -DTIMEOUTS={timeouts} -DHURRIES={hurries} "
        f"-DWINDOW={window}"
    )


def _holds(*bounds: int, covers: bool = False) -> Row:
    names = ("members", "ops", "crashes", "timeouts", "hurries", "window")
    name = ", ".join(f"{value} {what}" for value, what in zip(bounds, names, strict=False))
    return Row(name, HOLDS, _bounds(*bounds), covers)


# The violations of S1 that follow where S3 or S4, which only serve it, are not checked.
VALUES = "-DONLY_VALUES"
WINDOW_2 = _bounds(3, 2, 1, 1, 1, 2)
SMALL = (
    _holds(3, 2, 1, 1, 1, covers=True),
    _holds(3, 2, 1, 0, 1, 2),
    Row("every run ends", ENDS, _bounds(3, 1, 1, 1, 0)),
    Row("without 1: stop before the report", "S1", "-DWITHOUT_1"),
    Row("without 1B: COMPLETE, then DONE", "S1", "-DWITHOUT_1B"),
    Row("without 2: finished in reports", "S4", "-DWITHOUT_2"),
    Row("without 2, values", "S1", f"-DWITHOUT_2 {VALUES}"),
    Row("without 3: reports on this epoch", "S1", "-DWITHOUT_3"),
    Row("without 3B: of every member", "S1", "-DWITHOUT_3B"),
    Row("without 4: a redo discards", "S1", "-DWITHOUT_4"),
    Row("without 5: compare-and-set", "S3", "-DWITHOUT_5"),
    Row("without 5, values", "S1", f"-DWITHOUT_5 {VALUES}"),
    Row("without 6: who was excluded stays out", "S3", "-DWITHOUT_6"),
    Row("without 6, values", "S1", f"-DWITHOUT_6 {VALUES}"),
    Row("without 6B: a newcomer is not asked", "S1", f"-DWITHOUT_6B {VALUES}"),
    Row("without 7: COMPLETE is not enough", "S1", "-DWITHOUT_7"),
    Row("without 8: future epochs wait", STUCK, "-DWITHOUT_8"),
    Row("without 9: order", "S1", f"-DWITHOUT_9 {WINDOW_2}"),
    Row("without 9B: the cut", "S1", f"-DWITHOUT_9B {WINDOW_2}"),
    Row("without 9C: the cut is not early", "S1", f"-DWITHOUT_9C {WINDOW_2}"),
    Row("tempting rule", "S1", "-DTEMPTING"),
    Row("finished, silent, no patience", STUCK, f"-DLINGER {_bounds(3, 2, 1, 1, 0)}"),
)
LARGE = (
    _holds(3, 3, 1, 1, 1),
    _holds(3, 2, 2, 1, 1),
    _holds(3, 2, 1, 2, 0),
    _holds(4, 2, 1, 0, 1),
    _holds(4, 2, 0, 1, 1),
    _holds(4, 1, 1, 1, 0),
    _holds(4, 1, 2, 0, 1),
    _holds(3, 2, 1, 1, 0, 2),
    _holds(3, 3, 1, 0, 1, 2),
    Row("every run ends", ENDS, _bounds(3, 2, 1, 1, 1)),
)


def run_row(row: Row, folder: Path, limit_mb: int, limit_s: float, shortest: bool) -> Result:
    """Build and run the verifier of one row in `folder`, for the `shortest` violation or any."""
    cycles = row.expected == ENDS
    # No partial order reduction: every step is global, so that it saves a few per cent only, and
    # nothing has to be argued about `unless` and embedded C.
    flags = ["-DCOLLAPSE", "-DNOREDUCE", f"-DMEMLIM={limit_mb}", "-DNP" if cycles else "-DSAFETY"]
    if shortest and not cycles:
        flags.append("-DBFS")
    options = ["-m100000"]
    if cycles:
        options.append("-l")
    elif row.expected not in (HOLDS, STUCK):
        options.append("-E")  # a member that is stuck is not what this row is about
    long_search = shortest or row.expected in (HOLDS, ENDS)  # else -O2 costs more than it saves
    shutil.copy(MODEL, folder)
    for command in (
        ["spin", "-a", *row.defines.split(), MODEL.name],
        ["gcc", "-w", "-O2" if long_search else "-O0", *flags, "-o", "pan", "pan.c"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    def bound_memory() -> None:
        size = (limit_mb + 512) << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    start = time.monotonic()
    try:
        output = subprocess.run(
            ["./pan", *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
            preexec_fn=bound_memory,
        ).stdout
    except subprocess.TimeoutExpired:
        output = "Search not completed: timeout"
    seconds = time.monotonic() - start
    return Result(
        _found(row, output),
        int(_number(r"([\d.e+]+) states, stored", output)),
        int(_number(r"depth reached (\d+)", output)),
        _number(r"([\d.]+)\ttotal actual memory", output),
        seconds,
        output,
    )


def _number(pattern: str, output: str) -> float:
    match = re.search(pattern, output)
    return float(match[1]) if match else 0.0


def _found(row: Row, output: str) -> str:
    violated = re.search(r"violated: (\w+)", output)
    if violated:
        return violated[1]
    if "invalid end state (" in output:
        return STUCK
    if "non-progress cycle (" in output:
        return "cycle"
    whole = "errors: 0" in output and "not completed" not in output and "too small" not in output
    if not whole:
        return "not searched in full"
    if row.covers and (missing := _not_covered(output)):
        return f"not reached: {missing}"
    return ENDS if row.expected == ENDS else HOLDS


def _not_covered(output: str) -> str:
    """What the search did not reach: statements other than failing checks, kinds of event."""
    source = MODEL.read_text()
    events = set(re.findall(r"EVENT\((\w+)\)", source)) - {"what"}
    missing = sorted(events - set(re.findall(r"event: (\w+)", output)))
    unreached = re.findall(r"commit.pml:(\d+), (state \d+), (.*)", output)
    # A statement is listed once more with the guard of `unless`, under the same number. The world,
    # in init, never ends.
    failing = {
        state for _, state, text in unreached if re.search(r"violated|assert\(0\)|-end-", text)
    }
    missing += [f"line {line}" for line, state, _ in unreached if state not in failing]
    return ", ".join(missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="the larger state spaces instead")
    parser.add_argument("--trace", metavar="ROW", help="run one row, print what leads to it")
    args = parser.parse_args()
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if not shutil.which(tool):
            sys.exit(f"{tool} is not there: install the Debian package {package}")
    limit_mb, limit_s = (8_000, 1800.0) if args.large else (3_000, 300.0)
    rows = [row for row in (LARGE if args.large else SMALL) if (args.trace or row.name) in row.name]
    if not rows:
        parser.error(f"no row is named {args.trace}")
    width = max(len(row.name) for row in rows)
    print(f"{'configuration':{width}}  expected  found     states  depth  megabytes  seconds")
    good = True
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            result = run_row(row, Path(folder), limit_mb, limit_s, shortest=bool(args.trace))
            print(
                f"{row.name:{width}}  {row.expected:8}  {result.found:8}  {result.states:9}  "
                f"{result.depth:5}  {result.megabytes:9.0f}  {result.seconds:7.1f}",
                flush=True,
            )
            if args.trace:  # the shortest violation may be another one
                print(_trace(row, Path(folder)) or result.output)
            elif result.found != row.expected:
                good = False
    sys.exit(0 if good else 1)


def _trace(row: Row, folder: Path) -> str:
    command = ["spin", *row.defines.split(), "-T", "-B", "-t", MODEL.name]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return "".join(re.findall(r"^\d .*\n", output, re.MULTILINE))


if __name__ == "__main__":
    main()
