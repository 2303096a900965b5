"""What a group costs a rank besides time: memory beyond the tensors, CPU while it waits."""

import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torch_gpumode.bench import table
from torch_gpumode.bench.ranks import new_group, run_ranks

_MESSAGE_NBYTES = 2**27
_WAIT_S = 1.0


def memory_mib() -> dict[str, float]:
    """This process's memory in MiB.

    anon: private memory. shmem: shared memory that it has mapped and somebody touched, which
    counts once per process. shmem_share: the same, each page divided by the processes that map
    it; summed over ranks this is what the host has lost.
    """
    status = _kib_fields("/proc/self/status")
    rollup = _kib_fields("/proc/self/smaps_rollup")
    return {
        "anon": status["RssAnon"] / 1024,
        "shmem": status["RssShmem"] / 1024,
        "shmem_share": rollup["Pss_Shmem"] / 1024,
    }


def _kib_fields(path: str) -> dict[str, int]:
    fields = {}
    for line in Path(path).read_text().splitlines():
        words = line.split()
        if words[-1] == "kB":
            fields[words[0].rstrip(":")] = int(words[1])
    return fields


def cpu_s() -> float:
    """CPU seconds of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def waiting_cpu_s(group: dist.ProcessGroup, wait_s: float) -> float:
    """CPU seconds that this rank burns in an all_reduce for which rank 0 is `wait_s` late."""
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        time.sleep(wait_s)
    before = cpu_s()
    dist.all_reduce(x, group=group)
    return cpu_s() - before


def idle_cpu_s(wait_s: float) -> float:
    """CPU seconds that this process burns while its caller sleeps: threads that never rest."""
    before = cpu_s()
    time.sleep(wait_s)
    return cpu_s() - before


def report(backends: list[str], num_ranks: int, csv: Path | None) -> int:
    """Prints one row per backend; the worst rank of each. Exit code 0."""
    rows = []
    for backend in backends:
        per_rank = run_ranks(_rank_main, num_ranks, backend)
        worst = {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}
        rows.append({"backend": backend, "ranks": num_ranks, **worst})
    print(f"# {num_ranks} ranks, the worst one: MiB beyond the tensors after an all_reduce of 8 B")
    print(
        "# and of 128 MiB; CPU ms per second beyond that of the process without the group, waiting"
    )
    print("# for a late rank and with nothing to do")
    print(table.plain_table(list(rows[0]), [list(row.values()) for row in rows]))
    if csv:
        context = table.provenance()
        table.append_csv(csv, ({**context, **row} for row in rows))
    return 0


def _rank_main(backend: str) -> dict[str, float]:
    x = torch.ones(_MESSAGE_NBYTES // 4)
    without_s = idle_cpu_s(_WAIT_S)  # what the rest of the process burns, such as the Gloo world
    before = memory_mib()
    group = new_group(backend)
    small = torch.ones(2)
    dist.all_reduce(small, group=group)
    after_small = memory_mib()
    for _ in range(3):
        dist.all_reduce(x, group=group)
    after_large = memory_mib()
    result = {}
    for stage, after in (("8B", after_small), ("128M", after_large)):
        for name, value in after.items():
            result[f"{name}_{stage}"] = value - before[name]
    waiting_s = waiting_cpu_s(group, _WAIT_S)
    if dist.get_rank(group) == 0:
        waiting_s = without_s  # the late one does not wait
    result["waiting_ms"] = 1e3 * (waiting_s - without_s)
    result["idle_ms"] = 1e3 * (idle_cpu_s(_WAIT_S) - without_s)
    return result
