"""all_reduce of sparse tensors: values of every kind, bits, async, DDP, what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from _ranks import Rank, run
from _values import COMPLEX, FLOATS, assert_reduced, digest, random_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_gpumode.distributed as gd

DTYPES = [*FLOATS, *COMPLEX, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# The sizes of a tensor, and how many of its dimensions are sparse.
SHAPES = [((40,), 1), ((7, 5), 2), ((30, 3), 1), ((6, 2, 4, 3), 2), ((3000, 64), 1)]


def sparse_tensor(
    rank: int, sizes: tuple[int, ...], sparse_dims: int, dtype: torch.dtype, key: int = 0
) -> torch.Tensor:
    """Returns what a rank brings: ever fewer values, some in one place; none on the last of 3."""
    nnz = sizes[0] * (2 - rank) // 2
    generator = torch.Generator().manual_seed(hash((rank, sizes, key)))
    indices = torch.stack(
        [torch.randint(0, n, (nnz,), generator=generator) for n in sizes[:sparse_dims]]
    )
    shape = (nnz, *sizes[sparse_dims:])
    values = random_tensor(torch.Size(shape).numel(), dtype, rank, key).reshape(shape)
    return torch.sparse_coo_tensor(indices, values, sizes)


def check_sum(result: torch.Tensor, inputs: list[torch.Tensor], what: str) -> None:
    assert result.is_coalesced(), what
    assert_reduced(result.to_dense(), [each.coalesce().to_dense() for each in inputs], "sum", what)
    places = {tuple(place) for each in inputs for place in each._indices().t().tolist()}
    assert {tuple(place) for place in result.indices().t().tolist()} == places, what


def sums(me: Rank) -> list[str]:
    """Returns a digest of each result."""
    digests = []
    for sizes, sparse_dims in SHAPES:
        for dtype in DTYPES:
            inputs = [sparse_tensor(rank, sizes, sparse_dims, dtype) for rank in range(me.size)]
            tensor = inputs[me.rank].clone()
            if dtype.is_complex:  # of which dist.all_reduce would give us a copy, and Gloo too
                dist.group.WORLD.allreduce([tensor]).wait()
            else:
                dist.all_reduce(tensor)
            check_sum(tensor, inputs, f"{sizes} {dtype}")
            digests.append(digest([tensor.indices(), tensor.values()]))
    return digests


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums(size, tmp_path):
    """All ranks get the same bits, also where the order of additions matters."""
    first, *others = run(sums, size, tmp_path)
    assert others == [first] * (size - 1)


def no_values_at_all(me: Rank) -> None:
    for sizes in ((4, 3), (0, 3), (4, 0)):
        tensor = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, *sizes[1:]), sizes)
        dist.all_reduce(tensor)
        assert (tensor.shape, tensor._nnz()) == (sizes, 0)


def many_at_once(me: Rank) -> None:
    """Sparse and dense ops, coalesced tensors and others, waited for in another order."""
    inputs = [
        [sparse_tensor(rank, (50, 4), 1, torch.float64, key) for rank in range(me.size)]
        for key in range(6)
    ]
    mine = [each[me.rank].clone() for each in inputs]
    mine[::2] = [each.coalesce() for each in mine[::2]]
    dense = [torch.tensor([float(me.rank + key)]) for key in range(6)]
    works = []
    for each, plain in zip(mine, dense, strict=True):
        works += [dist.all_reduce(each, async_op=True), dist.all_reduce(plain, async_op=True)]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    for key in range(6):
        check_sum(mine[key], inputs[key], str(key))
        assert dense[key].item() == sum(range(me.size)) + me.size * key
        assert works[2 * key].result()[0] is mine[key]


def futures(me: Rank) -> None:
    inputs = [sparse_tensor(rank, (50, 4), 1, torch.float64) for rank in range(me.size)]
    tensor = inputs[me.rank].clone()
    work = dist.all_reduce(tensor, async_op=True)
    assert work.get_future().wait()[0] is tensor
    check_sum(tensor, inputs, "future")
    assert work.is_completed()

    def again(future: torch.futures.Future) -> torch.Tensor:
        """On the thread that completes futures, for which this op is to finish."""
        dist.all_reduce(future.value()[0])
        return future.value()[0]

    tensor = inputs[me.rank].clone()
    total = dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()
    expected = me.size * sum(each.to_dense() for each in inputs)
    torch.testing.assert_close(total.to_dense(), expected, rtol=1e-12, atol=1e-12)


def nobody_waits(me: Rank) -> None:
    """Neither a dropped work nor a dropped tensor stops an op."""
    for key in range(20):
        dist.all_reduce(sparse_tensor(me.rank, (50, 4), 1, torch.float32, key), async_op=True)
    kept = sparse_tensor(me.rank, (50, 4), 1, torch.float32).requires_grad_()
    future = dist.all_reduce(kept, async_op=True).get_future()
    gc.collect()
    future.wait()
    check_sum(
        kept.detach(),
        [sparse_tensor(rank, (50, 4), 1, torch.float32) for rank in range(me.size)],
        "kept",
    )


def call_returns_at_once(me: Rank) -> None:
    """Rank 1 calls only after it has heard from rank 0, which has called."""
    tensor = sparse_tensor(me.rank, (50, 4), 1, torch.float32)
    signal = torch.empty(1)
    if me.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        dist.send(signal, 1)
        work.wait()
    else:
        dist.recv(signal, 0)
        dist.all_reduce(tensor)


def in_inference_mode(me: Rank) -> None:
    inputs = [sparse_tensor(rank, (50, 4), 1, torch.float64) for rank in range(me.size)]
    with torch.inference_mode():
        tensor = inputs[me.rank].clone()
        dist.all_reduce(tensor, async_op=True).wait()
        check_sum(tensor, inputs, "inference")


def group_has_failed(me: Rank) -> None:
    """The call itself never raises; waiting does, and nothing is changed."""
    group = dist.new_group()
    tensor = sparse_tensor(me.rank, (50, 4), 1, torch.float64)
    before = tensor.to_dense()
    gd.abort(group)
    for _ in range(2):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work.is_completed()
        assert not work.is_success()
        for wait in (work.wait, work.get_future().wait):
            with pytest.raises(gd.CollectiveAborted):
                wait()
        assert torch.equal(tensor.to_dense(), before)


@pytest.mark.parametrize(
    "check",
    [
        no_values_at_all,
        many_at_once,
        futures,
        nobody_waits,
        call_returns_at_once,
        in_inference_mode,
        group_has_failed,
    ],
)
def test_on_two_ranks(check, tmp_path):
    run(check, 2, tmp_path)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.nn.Embedding(100, 8, sparse=True, dtype=torch.float64)
        self.last = torch.nn.Linear(8, 3, dtype=torch.float64)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(words).sum(1)).tanh()


def words(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((rank, step)))
    return torch.randint(0, 60, (5, 1 + 4 * rank), generator=generator)


def train(me: Rank, gradient_as_bucket_view: bool) -> None:
    single, model = Model(), Model()
    ddp = DDP(model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (single, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(single(words(rank, step)).pow(2).sum() / me.size for rank in range(me.size)).backward()
        ddp(words(me.rank, step)).pow(2).sum().backward()
        assert model.rows.weight.grad.is_sparse
        for expected, parameter in zip(single.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.to_dense(), expected.grad.to_dense(), rtol=1e-12, atol=1e-12
            )
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_ddp_with_a_sparse_embedding(gradient_as_bucket_view, tmp_path):
    run(train, 2, tmp_path, gradient_as_bucket_view)


# name: (call on the default group, what the message says)
REFUSED = {
    "op": (
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
        ValueError,
        "op: only SUM",
    ),
    "average": (
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.AVG),
        ValueError,
        "op: only SUM",
    ),
    "bool": (
        lambda: dist.all_reduce(torch.eye(3).bool().to_sparse()),
        ValueError,
        "tensors: torch does not add sparse tensors of Bool",
    ),
    "float8": (
        lambda: dist.all_reduce(
            torch.sparse_coo_tensor([[0]], torch.ones(1).to(torch.float8_e5m2), (3,))
        ),
        ValueError,
        "tensors: float8_e5m2 can be moved but not reduced",
    ),
    "two tensors": (
        lambda: dist.group.WORLD.allreduce([torch.eye(3).to_sparse()] * 2),
        ValueError,
        "tensors: expected a list of 1 tensors, got 2",
    ),
    "rows in a compressed form": (
        lambda: dist.all_reduce(torch.eye(3).to_sparse_csr()),
        NotImplementedError,
        "SparseCsrCPU",
    ),
    "another collective": (
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        NotImplementedError,
        "SparseCPU",
    ),
}


def refused(me: Rank) -> None:
    for name, (call, kind, text) in REFUSED.items():
        print(name)
        with pytest.raises(kind, match=text):
            call()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(ValueError, match="expected a dense tensor, got SparseCsr"):
        backend.allreduce([torch.eye(3).to_sparse_csr()])
    backend._start_coalescing()
    with pytest.raises(ValueError, match="sparse ones cannot be coalesced"):
        backend.allreduce([torch.eye(3).to_sparse()])
    backend._end_coalescing()
    tensor = torch.eye(3).to_sparse()
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), me.size * torch.eye(3))


def test_what_is_refused(tmp_path):
    run(refused, 2, tmp_path)
