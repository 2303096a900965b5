"""What torch.profiler shows of our ops: names, sizes, types and groups."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from _ranks import Rank, run
from torch.profiler import ProfilerActivity, profile


def traced(me: Rank) -> list[dict]:
    pair = dist.new_group([0, 1], group_desc="pair")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.randn(3, 5))
        work = dist.all_gather_into_tensor(
            torch.empty(8, dtype=torch.int32),
            torch.randint(9, (4,), dtype=torch.int32),
            group=pair,
            async_op=True,
        )
        work.wait()
        if me.rank == 0:
            dist.send(torch.randn(6), 1)
        else:
            dist.recv(torch.empty(6), 0)
    path = me.folder / f"trace{me.rank}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if "dur" in event]


def test_profiler(tmp_path):
    for rank, events in enumerate(run(traced, 2, tmp_path)):
        names = {event["name"] for event in events}
        transfer = "send" if rank == 0 else "recv"
        ops = ["all_reduce", "all_gather_into_tensor", transfer]
        assert {f"gpumode:{op}" for op in ops} <= names
        comms = [e["args"] for e in events if e["name"] == "record_param_comms"]
        assert [args["Collective name"] for args in comms] == ops
        reduce, gather, p2p = comms
        assert (reduce["In msg nelems"], reduce["Out msg nelems"]) == (15, 15)
        assert (gather["In msg nelems"], gather["Out msg nelems"]) == (4, 8)
        assert p2p["In msg nelems"] + p2p["Out msg nelems"] == 6
        assert [args["dtype"] for args in comms] == ["Float", "Int", "Float"]
        assert [args["Group size"] for args in comms] == [2, 2, 2]
        assert reduce["Process Group Description"] == "default_pg"
        assert gather["Process Group Description"] == "pair"
