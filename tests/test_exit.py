"""Case B5: a process ends with exit code 0, whether its group was destroyed or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Each way of ending is tried by two ranks, forked from one interpreter that has torch loaded. They
# leave through the end of the script, so that everything an exiting interpreter does is done.
SCRIPT = """
import json, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch_gpumode import _autoload
_autoload.register()
torch.set_num_threads(1)

def destroyed(rank):
    dist.destroy_process_group()

def not_destroyed(rank):
    pass

def op_in_flight(rank):
    global work
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)

def callback_in_flight(rank):
    global work
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.get_future().then(lambda future: time.sleep(0.2))

def waiting_thread(rank):
    if rank == 0:
        def wait():
            try:
                dist.all_reduce(torch.ones(3))
            except RuntimeError:
                pass
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.2)

def waiting_thread_and_late_peer(rank):
    if rank == 0:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)), daemon=True).start()
        time.sleep(0.2)
    else:
        time.sleep(1)

def busy_threads(rank):
    import torch_gpumode.distributed as gd
    def again_and_again(call):
        while True:
            try:
                call()
            except RuntimeError:
                pass
    calls = [gd.abort, lambda: dist.all_reduce(torch.ones(3)),
             lambda: dist.all_reduce(torch.ones(3), async_op=True)]
    for call in calls:
        threading.Thread(target=again_and_again, args=(call,), daemon=True).start()
    time.sleep(0.2)

def sub_groups(rank):
    global groups
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)

def failed(rank):
    import torch_gpumode.distributed as gd
    gd.abort()

def peer_leaves_first(rank):
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    if rank == 0:
        time.sleep(0.3)

codes = {}
ways = [destroyed, not_destroyed, op_in_flight, callback_in_flight, waiting_thread,
        waiting_thread_and_late_peer, busy_threads, sub_groups, failed, peer_leaves_first]
for way in ways:
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            break
        pids.append(pid)
    if pid == 0:
        signal.alarm(30)  # a process that stays alive is killed
        store = dist.FileStore(f"{sys.argv[1]}/{way.__name__}", 2)
        dist.init_process_group("gpumode", store=store, rank=rank, world_size=2,
                                timeout=timedelta(seconds=20))
        dist.all_reduce(torch.ones(3))
        way(rank)
        break
    codes[way.__name__] = [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids]
else:
    print(json.dumps(codes))
"""


def test_exit(tmp_path):
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert len(codes) == 10
    assert set(map(tuple, codes.values())) == {(0, 0)}, f"{codes}\n{done.stderr}"
    assert "terminate called" not in done.stderr
