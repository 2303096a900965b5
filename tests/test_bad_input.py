"""A user's mistake: an error that names the argument, nothing changed, nothing lost."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, Ranks, run

import torch_gpumode.distributed as gd

# name: (call on a group of 2, what the message says)
MISTAKES = {
    "gaps": (lambda w: w.allreduce([torch.ones(4, 4)[:, :2]]), "tensors: .*gaps.*contiguous"),
    "rows that are not outermost": (
        lambda w: w._allgather_base(torch.ones(4, 4).t(), torch.ones(4, 2).t()),
        "output: expected a contiguous tensor",
    ),
    "freed storage": (lambda w: w.allreduce([_freed()]), "tensors: its storage has 0 bytes"),
    "expanded": (lambda w: w.broadcast([torch.ones(1).expand(4)]), "tensors: .*contiguous"),
    "meta device": (
        lambda w: backend(w).allreduce([torch.ones(4, device="meta")]),
        "tensors: tensors on meta are not supported by this build; expected cpu",
    ),
    "sparse": (
        lambda w: backend(w).allreduce_coalesced([torch.eye(3).to_sparse()]),
        "tensors: expected a dense tensor",
    ),
    "empty list": (lambda w: backend(w).allreduce([]), "tensors: expected a list of 1"),
    "empty coalesced": (
        lambda w: backend(w).allreduce_coalesced([]),
        "tensors: expected at least one",
    ),
    "two tensors": (
        lambda w: w.allreduce([torch.ones(1), torch.ones(1)]),
        "tensors: expected a list of 1 tensors, got 2",
    ),
    "short output list": (
        lambda w: w.allgather([[torch.ones(1)]], [torch.ones(1)]),
        "output: expected a list of 2 tensors, got 1",
    ),
    "short input list": (
        lambda w: w.reduce_scatter([torch.ones(1)], [[torch.ones(1)]]),
        "input: expected a list of 2 tensors, got 1",
    ),
    "mismatched lists": (
        lambda w: w.allgather_into_tensor_coalesced([torch.ones(2)], [torch.ones(1)] * 2),
        "outputs: expected a list of 2 tensors, got 1",
    ),
    "mixed dtypes": (
        lambda w: w.allgather([[torch.ones(1), torch.ones(1, dtype=torch.int32)]], [torch.ones(1)]),
        "output: expected Float",
    ),
    "wrong numel": (
        lambda w: w._allgather_base(torch.ones(5), torch.ones(2)),
        "output: expected 4 elements, got 5",
    ),
    "negative root": (lambda w: w.broadcast(torch.ones(1), -1), "src: expected a rank in"),
    "root too large": (lambda w: w.reduce(torch.ones(1), 2), "dst: expected a rank in"),
    "negative peer": (lambda w: w.send([torch.ones(1)], -2, 0), "dst: expected a rank in"),
    "peer too large": (lambda w: w.recv([torch.ones(1)], 2, 0), "src: expected a rank in"),
    "avg of bools": (
        lambda w: w.allreduce([torch.ones(2, dtype=torch.bool)], dist.ReduceOp.AVG),
        "op: avg is not defined for bool",
    ),
    "bits of floats": (
        lambda w: w.allreduce([torch.ones(2)], dist.ReduceOp.BXOR),
        "op: bxor is not defined for float32",
    ),
    "order of complex": (
        lambda w: w.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX),
        "op: max is not defined for complex64",
    ),
    "float8 sum": (
        lambda w: w.allreduce([torch.ones(2).to(torch.float8_e5m2)]),
        "tensors: float8_e5m2 can be moved but not reduced",
    ),
    "quantized": (
        lambda w: backend(w).allreduce(
            [torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)]
        ),
        "tensors: QInt8 is not supported",
    ),
    "splits too many": (
        lambda w: w.alltoall_base(torch.ones(2), torch.ones(2), [1, 1, 0], [1, 1]),
        "output: expected split sizes for 2 ranks, got 3",
    ),
    "splits of the wrong sum": (
        lambda w: w.alltoall_base(torch.ones(2), torch.ones(2), [1, 1], [1, 0]),
        "input: split sizes add up to 1",
    ),
    "negative split": (
        lambda w: w.alltoall_base(torch.ones(2), torch.ones(2), [1, 1], [3, -1]),
        "input: expected split sizes in",
    ),
    "uneven without splits": (
        lambda w: w.alltoall_base(torch.ones(3), torch.ones(3), [], []),
        "input: expected a first dimension that 2 divides",
    ),
    "list of the wrong numel": (
        lambda w: w.allgather([[torch.ones(3), torch.ones(3)]], [torch.ones(2)]),
        r"output\[\d\]: expected 2 elements",
    ),
    "overlap": (lambda w: _overlapping(w), "output: overlaps"),
    "gathered over the input": (lambda w: _shifted(w), "output: overlaps"),
}


def _overlapping(world: dist.ProcessGroup) -> dist.Work:
    tensor = torch.ones(6)
    return world.alltoall_base(tensor[:4], tensor[2:], [], [])


def _freed() -> torch.Tensor:
    """As FSDP frees a parameter."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _shifted(world: dist.ProcessGroup) -> dist.Work:
    """Nearly in place: on neither rank is the input where its output is."""
    tensor = torch.ones(8)
    return world._allgather_base(tensor, tensor[2:6])


def backend(world: dist.ProcessGroup):
    """The C++ object itself, past torch's own dispatch and checks."""
    return world._get_backend(torch.device("cpu"))


def make_mistakes(me: Rank) -> None:
    world = dist.group.WORLD
    for name, (call, message) in MISTAKES.items():
        refusal = ""
        try:
            call(world)
        except ValueError as error:
            refusal = str(error)
        assert re.search(message, refusal), name
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0], f"the group does not work after {name}"


def test_mistakes(tmp_path):
    run(make_mistakes, 2, tmp_path)


def only_on_one_rank(me: Rank) -> None:
    """A call that was refused here has not begun: the next one is in step with the others'."""
    if me.rank == 0:
        with pytest.raises(ValueError):
            dist.all_reduce(torch.ones(4, 4)[:, :2])
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]


def test_only_on_one_rank(tmp_path):
    run(only_on_one_rank, 2, tmp_path)


def use_after_abort(me: Rank) -> None:
    dist.all_reduce(torch.ones(1))
    gd.abort(dist.group.WORLD)
    tensor = torch.ones(2)
    with pytest.raises(gd.CollectiveAborted):
        dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(gd.CollectiveAborted):
        dist.send(tensor, 1 - me.rank)
    with pytest.raises(gd.CollectiveAborted):
        dist.barrier()
    gd.abort(dist.group.WORLD)


def use_after_shutdown(me: Rank) -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    group.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        group.allreduce([torch.ones(1)])


@pytest.mark.parametrize("function", [use_after_abort, use_after_shutdown])
def test_use_after_the_end(function, tmp_path):
    run(function, 2, tmp_path)


def come_late(me: Rank) -> None:
    if me.rank in (1, 3):
        return
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"these ranks did not come: 1, 3"):
        me.init(timeout_s=1.0)
    assert time.monotonic() - began < 3


def test_ranks_that_do_not_come(tmp_path):
    run(come_late, 4, tmp_path, init=False)


def store_in_rank_0(me: Rank, port: int) -> None:
    """The store dies with rank 0; a group that needs it says so."""
    store = dist.TCPStore(
        "127.0.0.1", port, 2, me.rank == 0, timedelta(seconds=20), wait_for_workers=False
    )
    me.init(store=store)
    dist.all_reduce(torch.ones(1))
    me.say("open")
    if me.rank == 0:
        time.sleep(60)
    with pytest.raises(gd.PeerLost):
        dist.all_reduce(torch.ones(1))
    began = time.monotonic()
    with pytest.raises(dist.DistError, match=r"store is gone|[Cc]onnection|[Bb]roken pipe"):
        gd.rebuild(timeout=timedelta(seconds=5))
    assert time.monotonic() - began < 6
    backend_type = type(backend(dist.group.WORLD))
    options = backend(dist.group.WORLD).options
    with pytest.raises(dist.DistStoreError, match="the store is gone"):
        backend_type(store, 1, 2, options)


def test_store_that_is_gone(tmp_path):
    import signal
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Ranks(store_in_rank_0, 2, tmp_path, port, init=False) as ranks:
        assert ranks.heard_from_all() == ["open", "open"]
        ranks.signal(0, signal.SIGKILL)
        ranks.join(lost=(0,))


def bad_arguments_of_ours(me: Rank) -> None:
    with pytest.raises(ValueError, match="device: "):
        gd.set_as_default("tpu")
    with pytest.raises(ValueError, match="handles: the handle of this rank is not among them"):
        gd.reconfigure(1, ["nobody"])
    handle = gd.get_reconfigure_handle()
    with pytest.raises(ValueError, match="handles: one of them is there twice"):
        gd.reconfigure(1, [handle, handle])
    with pytest.raises(ValueError, match='handles: "nobody" is not a handle'):
        gd.reconfigure(1, [handle, "nobody"])
    name, rank, host, *rest = handle.split("/")
    with pytest.raises(ValueError, match="is of another host or network namespace"):
        gd.reconfigure(1, [handle, "/".join([name, rank, f"not_{host}", *rest])])
    mixed = dist.new_group(backend="cpu:gpumode,cuda:gloo")
    with pytest.raises(RuntimeError, match="cuda:gloo, and only gpumode can be rebuilt"):
        gd.rebuild(mixed)
    destroyed = dist.new_group()
    dist.destroy_process_group(destroyed)
    with pytest.raises(ValueError, match="group: it has been destroyed"):
        gd.rebuild(destroyed)
    with pytest.raises(ValueError, match="uuid: expected 0 or more, got -7"):
        gd.reconfigure(-7, [handle])
    for call in (gd.abort, gd.rebuild, gd.get_reconfigure_handle):
        for group in ("x", dist.GroupMember.NON_GROUP_MEMBER):
            with pytest.raises(ValueError, match="group: expected a group"):
                call(group)
    for timeout in (timedelta.min, timedelta(0)):
        with pytest.raises(ValueError, match="timeout: expected a positive one"):
            gd.reconfigure(1, [handle], timeout=timeout)
        with pytest.raises(ValueError, match="timeout: expected a positive one"):
            gd.rebuild(timeout=timeout)
    with pytest.raises(TypeError, match="timeout: expected a timedelta, got 5"):
        gd.rebuild(timeout=5)
    with pytest.raises(ValueError, match="min_size: "):
        gd.rebuild(min_size=0)
    with pytest.raises(ValueError, match="pg_options: "):
        dist.new_group([0, 1], pg_options=object())
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == me.size


def test_bad_arguments_of_ours(tmp_path):
    run(bad_arguments_of_ours, 2, tmp_path)


def endless_timeouts(me: Rank) -> None:
    """Longer than nanoseconds can count."""
    age = timedelta(days=300 * 365)
    group = dist.new_group([0, 1], timeout=timedelta(days=30))
    backend(group)._set_default_timeout(age)
    for longest in (age, timedelta.max):
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait(age)
        assert tensor.item() == me.size
        gd.rebuild(group, timeout=longest)


def test_endless_timeouts(tmp_path):
    run(endless_timeouts, 2, tmp_path)


def forked_child(me: Rank) -> None:
    """A child of a rank cannot use its group, nor hurt it."""
    import os

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            code = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == me.size


def test_forked_child(tmp_path):
    run(forked_child, 2, tmp_path)
