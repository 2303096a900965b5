"""torch_gpumode.bench: what it reports must be right, and a wrong result must not pass."""

import argparse
import csv
import mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_gpumode import bench
from torch_gpumode.bench import cases, collectives, floor, footprint, ranks, table, timer


def row(**changes: object) -> table.Row:
    values: dict[str, object] = {
        "op": "all_reduce",
        "backend": "gpumode",
        "ranks": 4,
        "size": 1 << 20,
        "count": 1 << 18,
        "type": "float",
        "redop": "sum",
        "root": -1,
        "in_place": True,
        "time_us": 1000.0,
        "wrong": 0,
        "copy_gbs": 8.0,
        "baseline_us": 5000.0,
    }
    return table.Row(**{**values, **changes})


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(op: str, factor: float) -> None:
    assert floor.busbw_factor(op, 4) == factor


def test_every_case_has_a_factor_and_a_floor() -> None:
    for op in cases.CASES:
        assert floor.busbw_factor(op, 2) > 0
        assert floor.floor_nbytes(op, 2, 100, in_place=False) > 0
        assert floor.floor_nbytes(op, 1, 100, in_place=False) == 0


def test_floor_counts_the_bytes_of_each_step() -> None:
    # Two ranks, 100 bytes: copy in 50, reduce 50 (two reads, two writes), copy out 50.
    assert floor.floor_nbytes("all_reduce", 2, 100, in_place=True) == 100 + 200 + 100
    assert floor.floor_nbytes("reduce_scatter", 2, 100, in_place=True) == 100 + 150
    # Directly on the root: it reads two inputs of 100 and writes one.
    assert floor.floor_nbytes("reduce", 2, 100, in_place=True) == 300
    # Copy in 50, copy out 50, and 50 more to their place.
    assert floor.floor_nbytes("all_gather", 2, 100, in_place=True) == 200
    assert floor.floor_nbytes("all_gather", 2, 100, in_place=False) == 300
    # Four ranks, 100 bytes: 75 in, 25 from four inputs to two places, 75 out.
    assert floor.floor_nbytes("all_reduce", 4, 100, in_place=True) == 150 + 150 + 150


def test_row_derives_bandwidths_and_ratios() -> None:
    r = row()
    assert r.algbw == pytest.approx(1.048576)
    assert r.busbw == pytest.approx(1.048576 * 1.5)
    assert r.floor_us == pytest.approx(4.5 * (1 << 20) / 8e3)
    assert r.speedup == 5.0


def test_table_is_that_of_nccl_tests() -> None:
    title, places, names, units = table.header("all_gather", "gloo").splitlines()
    assert title.startswith("# all_gather")
    nccl_tests = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    assert " ".join(names.split()).startswith(f"# backend {nccl_tests}")
    assert places.index("out-of-place") < places.index("in-place", 85)

    r = row(op="all_gather", redop="none")
    line = table.line(row(op="all_gather", redop="none", in_place=False, wrong=3), r)
    words = line.split()
    assert words[:6] == ["gpumode", "1048576", "262144", "float", "none", "-1"]
    assert words[6:14] == ["1000.00", "1.05", "0.79", "3", "1000.00", "1.05", "0.79", "0"]
    assert words[14:] == ["8.00", f"{r.floor_us:.2f}", f"{1000 / r.floor_us:.2f}", "5.00"]
    for name in ("size", "root", "copy", "speedup"):  # columns end where their names end
        end = names.index(name) + len(name)
        assert line[end - 1] != " "
        assert line[end : end + 1] in (" ", "")
    assert len(units) <= len(names) == len(line)


def test_table_without_out_of_place_and_without_check() -> None:
    words = table.line(None, row(wrong=-1, size=8, count=2)).split()
    assert words[6:10] == ["N/A"] * 4
    assert words[13] == "N/A"
    assert words[16] == "-"  # a floor of nanoseconds says nothing


def test_csv_has_what_a_number_needs_and_refuses_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.csv"
    context = table.provenance()
    table.append_csv(path, [table.csv_row(row(), context)])
    table.append_csv(path, [table.csv_row(row(size=64), context)])
    with path.open() as file:
        first, second = csv.DictReader(file)
    for column in ("date", "commit", "torch", "python", "cpu", "cores", "ranks", "time_us"):
        assert column in first
    assert first["date"].endswith("Z")
    assert first["torch"] == torch.__version__
    assert (first["size"], second["size"]) == ("1048576", "64")
    assert float(first["busbw"]) == pytest.approx(row().busbw, rel=1e-3)

    before = path.read_text()
    with pytest.raises(ValueError, match="other columns"):
        table.append_csv(path, [{"date": "today"}])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("16m", 16 << 20), ("1G", 1 << 30)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert collectives.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "8x", "-8", "1.5M", "8KK", "8 "])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        collectives.parse_size(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-b 8x", "-b/--minbytes"),
        ("-n 0", "-n/--iters"),
        ("-f 1", "-f must be 2 or more"),
        ("-b 16 -e 8", "-b at most -e"),
        ("-r 2 --ranks 2", "-r is 2"),
        ("-c 2", "-c/--check"),
        ("--ops all_reduce,all_reduse", "'all_reduse' is none of"),
        ("-o avg -d int32", "-o avg needs a floating-point type"),
    ],
)
def test_bad_flags(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench.main(["collectives", *flags.split()])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["collectivs"]) == 2
    assert "collectives" in capsys.readouterr().err


# On ranks. Gloo stands for any backend: what is tested here is the bench.


def count_wrong(spoil: bool, redop: str, dtype: torch.dtype) -> dict[str, int]:
    group = dist.group.WORLD
    assert group is not None
    wrong = {}
    for op, case in cases.CASES.items():
        problem = cases.Problem(op, group, 12, dtype, redop, 1, case.in_place, seed=5)
        call = case.make(problem)
        if spoil and call.output.numel():

            def run(call: cases.Call = call) -> None:
                call.run()
                call.output[-1] += 1

            call = cases.Call(run, call.output, call.expected)
        wrong[op] = cases.num_wrong(call, exact=redop != "avg")
    return wrong


@pytest.mark.parametrize(
    ("redop", "dtype"),
    [("sum", torch.float), ("prod", torch.int64), ("max", torch.double), ("avg", torch.float)],
)
def test_right_results_are_right(redop: str, dtype: torch.dtype) -> None:
    for wrong in ranks.run_ranks(count_wrong, 3, False, redop, dtype):
        assert wrong == dict.fromkeys(cases.CASES, 0)


def test_one_wrong_element_is_counted() -> None:
    results = ranks.run_ranks(count_wrong, 3, True, "sum", torch.float)
    for rank, wrong in enumerate(results):
        expected = dict.fromkeys(cases.CASES, 1)
        if rank != 1:  # only the root has a result
            expected["reduce"] = expected["gather"] = 0
        assert wrong == expected


def time_two() -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    calls: list[str] = []
    seconds = timer.time_alternately(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        iterations=2,
        warmup=1,
        rounds=2,
        control=group,
    )
    assert "".join(calls) == "ab" + "aaaabbbb" * 2
    return seconds


def test_contenders_alternate_and_ranks_agree_on_times() -> None:
    first, second = ranks.run_ranks(time_two, 2)
    assert first == second
    assert first["a"] > 0


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("of rank one")
    dist.barrier()


def test_a_failed_rank_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*of rank one"):
        ranks.run_ranks(fail_on_one, 2)


def test_memory_sees_new_private_and_shared_memory() -> None:
    before = footprint.memory_mib()
    private = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE)  # malloc may hand out old pages
    private.write(b"x" * (8 << 20))
    shared = torch.ones(4 << 20, dtype=torch.uint8).share_memory_()
    after = footprint.memory_mib()
    assert after["anon"] - before["anon"] > 7
    assert 3.9 < after["shmem"] - before["shmem"] < 4.5
    assert 3.9 < after["shmem_share"] - before["shmem_share"] < 4.5
    assert shared.sum() > 0
    private.close()


def test_run_of_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    flags = f"--ranks 2 --backends gloo -b 8 -e 512 -f 64 -n 2 -w 1 --rounds 1 --csv {path}"
    assert bench.main(["collectives", *flags.split(), "--ops", "all_reduce,all_gather"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if line.split()[0] == "gloo"]) == 4
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["op"], r["size"], r["in_place"]) for r in rows] == [
        ("all_reduce", "8", "True"),
        ("all_reduce", "512", "True"),
        ("all_gather", "8", "False"),
        ("all_gather", "8", "True"),
        ("all_gather", "512", "False"),
        ("all_gather", "512", "True"),
    ]
    assert {r["wrong"] for r in rows} == {"0"}
