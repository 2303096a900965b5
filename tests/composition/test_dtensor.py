"""DTensors. Every redistribution, and operators that communicate, against one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import Rank, run
from _values import OPS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._ops import _conv_ops
from torch.distributed.tensor.experimental import implicit_replication

SHAPE = (7, 5)  # nothing divides it: some ranks of some meshes have one row less, or none
REDUCTIONS = ["sum", "avg", "min", "max", "product"]
SOURCES = [Replicate(), Shard(0), Shard(1), *map(Partial, REDUCTIONS)]
TARGETS = [Replicate(), Shard(0), Shard(1)]
# torch lets a shard become a term of a sum from 2.14 on.
TO_PARTIAL = [Partial("sum")] if hasattr(Shard, "_to_partial_tensor") else []

Placements = tuple[Placement, ...]


def random(*key: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def local_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """The definition: a shard is one of torch.chunk's, which are fewer than ranks at times."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = whole.chunk(mesh.size(dim), placement.dim)
            index = mesh.get_local_rank(dim)
            nothing = whole.narrow(placement.dim, 0, 0)
            whole = chunks[index] if index < len(chunks) else nothing
    return whole


def make(mesh: DeviceMesh, placements: Placements) -> tuple[DTensor, torch.Tensor]:
    """Returns a random DTensor, and what it stands for."""
    terms = [range(mesh.size(d)) if p.is_partial() else [0] for d, p in enumerate(placements)]
    at = [mesh.get_local_rank(d) if p.is_partial() else 0 for d, p in enumerate(placements)]
    # The term of each coordinate, with a leading dimension for each dimension of the mesh.
    whole = torch.stack([random(*key) for key in itertools.product(*terms)])
    whole = whole.unflatten(0, [len(t) for t in terms])
    mine = whole[tuple(at)]
    for placement in placements:
        op = placement.reduce_op if isinstance(placement, Partial) else "sum"
        whole = OPS[op][1](whole)
    local = local_part(mine, mesh, placements).contiguous()
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made, whole


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13, msg=lambda m: f"{what}: {m}")


def redistribute(mesh: DeviceMesh, source: Placements, target: Placements, async_op: bool) -> None:
    made, expected = make(mesh, source)
    what = f"{source} to {target}"
    result = made.redistribute(placements=target, async_op=async_op)
    assert result.placements == target
    if any(p.is_partial() for p in target):
        assert_close(result.full_tensor(), expected, what)
    else:
        assert_close(result.to_local() + 0, local_part(expected, mesh, target), what)


def gradient(mesh: DeviceMesh, source: Placements, target: Placements) -> None:
    """Of a loss that each rank computes from its part of the result."""
    made, expected = make(mesh, source)
    leaf = made.detach().requires_grad_()
    weight = random(99)
    ours = distribute_tensor(weight, mesh, target)
    loss = (leaf.redistribute(placements=target) * ours).sum().full_tensor()
    loss.backward()
    what = f"gradient of {source} to {target}"
    assert_close(loss.detach(), (expected * weight).sum(), what)
    assert_close(leaf.grad.full_tensor(), weight, what)


def mixes(placements: Placements) -> bool:
    """Whether a result depends on which dimension is reduced first, as a sum of maxima does."""
    ops = {p.reduce_op for p in placements if p.is_partial()}
    return len(ops) > 1 and ops != {"sum", "avg"}


def pairs(num_dims: int) -> list[tuple[Placements, Placements]]:
    sources = [s for s in itertools.product(SOURCES, repeat=num_dims) if not mixes(s)]
    result = list(itertools.product(sources, itertools.product(TARGETS, repeat=num_dims)))
    if num_dims == 1:
        result += [((source,), (source,)) for source in SOURCES]
        result += [((Shard(dim),), (target,)) for dim in (0, 1) for target in TO_PARTIAL]
    return result


def every_pair(me: Rank, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for i, (source, target) in enumerate(pairs(len(shape))):
        for async_op in (False, True) if len(shape) == 1 else (i % 2 == 0,):
            redistribute(mesh, source, target, async_op)


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_redistribute(shape, tmp_path):
    run(every_pair, torch.Size(shape).numel(), tmp_path, shape)


def gradients(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (me.size,))
    for source in [Replicate(), Shard(0), Shard(1)]:
        for target in TARGETS:
            gradient(mesh, (source,), (target,))


def test_gradient_of_redistribute(tmp_path):
    run(gradients, 3, tmp_path)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# What communicates within an operator, or after it: each on a matrix, sharded in each way.
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(1),
    "max of all": lambda x: x.max(),
    "min": lambda x: x.amin(1),
    "max": lambda x: x.amax(0),
    "prod": lambda x: x.prod(0),
    "all": lambda x: (x > -1.5).all(1),
    "any": lambda x: (x > 1.5).any(0),
    "any of all": lambda x: (x > 1.5).any(),
    "all of all": lambda x: (x > -9).all(),
    "sum of bool": lambda x: (x > 0).sum(0),
    "sum of int64": lambda x: (9 * x).floor().long().sum(1),
    "max of int32": lambda x: (9 * x).floor().int().amax(0),
    "count_nonzero": lambda x: torch.count_nonzero(x),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm of degree 3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm of degree inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "var": lambda x: x.var(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(1),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "cumsum": lambda x: x.cumsum(0),
    "topk": lambda x: x.topk(3, 0)[0],
    "sort": lambda x: x.sort(1)[0],
    "matmul": lambda x: x @ x.T,
    "matmul of transposed": lambda x: x.T @ x,
    "relu": lambda x: x.relu(),
    "add": lambda x: x + x.sum(0, keepdim=True),
    "cat": lambda x: torch.cat([x, 2 * x], 0),
    "layer_norm": lambda x: F.layer_norm(x, SHAPE[1:]),
    "select": lambda x: x[2],
    "slice": lambda x: x[1:5],
    "index_select": lambda x: x.index_select(0, index(4, 1)),
    "equal": lambda x: torch.tensor(torch.equal(x, x.clone())),
    "not equal": lambda x: torch.tensor(torch.equal(x, x + 1)),
}


def operators(me: Rank, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    sources = itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=len(shape))
    for source in sources:
        made, whole = make(mesh, source)
        for name, operator in OPERATORS.items():
            if name.startswith(("arg", "index")) and mesh.ndim > 1:
                continue  # torch's own answer is wrong there, for some version on any backend
            with implicit_replication():
                result = operator(made)
            if isinstance(result, DTensor):
                result = result.full_tensor()
            assert_close(result, operator(whole), f"{name} of {source}")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2,), marks=pytest.mark.long),
        (3,),
        pytest.param((2, 2), marks=pytest.mark.long),
    ],
)
def test_operators(shape, tmp_path):
    run(operators, torch.Size(shape).numel(), tmp_path, shape)


def matmuls(me: Rank, shape: tuple[int, ...]) -> None:
    """Both factors sharded in each way; the gradients as well."""
    mesh = init_device_mesh("cpu", shape)
    layouts = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=len(shape)))
    factors = [random(1, shape=(7, 5)), random(2, shape=(5, 6))]
    weight = random(3, shape=(7, 6))
    expected = [weight @ factors[1].T, factors[0].T @ weight]
    for left, right in itertools.product(layouts, repeat=2):
        a, b = (
            distribute_tensor(whole, mesh, placements).requires_grad_()
            for whole, placements in zip(factors, (left, right), strict=True)
        )
        product = (a @ b).full_tensor()
        (product * weight).sum().backward()
        assert_close(product.detach(), factors[0] @ factors[1], f"{left} @ {right}")
        for each, gradient in zip((a, b), expected, strict=True):
            assert_close(each.grad.full_tensor(), gradient, f"gradient of {left} @ {right}")


@pytest.mark.parametrize("shape", [(3,), pytest.param((2, 2), marks=pytest.mark.long)])
def test_matmul(shape, tmp_path):
    run(matmuls, torch.Size(shape).numel(), tmp_path, shape)


def convolution(me: Rank) -> None:
    """Each rank has a part of the image, and exchanges the borders with its neighbours."""
    mesh = init_device_mesh("cpu", (me.size,))
    torch.manual_seed(5)
    layer = torch.nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    image = random(4, shape=(2, 2, 5, 4 * me.size))
    expected = layer(image)
    weight = random(5, shape=tuple(expected.shape))
    (expected * weight).sum().backward()
    gradients = [layer.weight.grad, layer.bias.grad]
    layer.zero_grad()

    layer = distribute_module(layer, mesh)
    output = layer(distribute_tensor(image, mesh, [Shard(3)]))
    assert_close(output.full_tensor().detach(), expected.detach(), "convolution")
    output.backward(distribute_tensor(weight, mesh, [Shard(3)]))
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert_close(parameter.grad.full_tensor(), gradient, "gradient")


# From 2.14 on torch's handler ignores that the image was to be gathered, on any backend.
@pytest.mark.skipif(
    hasattr(_conv_ops, "_supports_last_dim_sharding"),
    reason="this torch gives a part of the result",
)
@pytest.mark.parametrize("size", [2, 3])
def test_convolution(size, tmp_path):
    run(convolution, size, tmp_path)


def distribution(me: Rank) -> None:
    """What only one rank knows reaches the others, on each dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in itertools.product(TARGETS, repeat=2):
        for source in (0, 1):  # of each dimension
            # Rank 0, or 3, knows it; the rest has something of its own.
            known, mine = random(3 * source), random(me.rank)
            made = distribute_tensor(mine, mesh, placements, src_data_rank=source)
            what = f"{placements} from {source}"
            assert_close(made.to_local(), local_part(known, mesh, placements), what)
        kept = distribute_tensor(random(me.rank), mesh, placements, src_data_rank=None)
        assert_close(kept.to_local(), local_part(random(me.rank), mesh, placements), "kept")


def checked_locals(me: Rank) -> None:
    """from_local(run_check=True) makes replicas of the first rank's tensor."""
    mesh = init_device_mesh("cpu", (2, 2))
    made = DTensor.from_local(random(me.rank), mesh, [Shard(0), Replicate()], run_check=True)
    assert_close(made.full_tensor(), torch.cat([random(0), random(2)]), "replicas")
    made = DTensor.from_local(random(me.rank), mesh, [Replicate(), Shard(1)], run_check=True)
    assert_close(made.full_tensor(), torch.cat([random(0), random(1)], 1), "replicas")


def modules(me: Rank) -> None:
    """Each rank makes other weights; those of the first are taken."""
    mesh = init_device_mesh("cpu", (2, 2))
    layers = []
    for rank in range(me.size):
        torch.manual_seed(rank)
        layers.append(torch.nn.Linear(5, 7))

    def shard(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in [*module.named_parameters(recurse=False)]:
            made = distribute_tensor(parameter, mesh, [Shard(0), Replicate()])
            module.register_parameter(key, torch.nn.Parameter(made))

    for partition in (None, shard):
        distributed = distribute_module(copy.deepcopy(layers[me.rank]), mesh, partition)
        for ours, theirs in zip(distributed.parameters(), layers[0].parameters(), strict=True):
            assert_close(ours.full_tensor(), theirs, f"partitioned by {partition}")


def random_operators(me: Rank) -> None:
    """torch has no offsets for generators of the CPU: replicas agree if their seeds do."""
    mesh = init_device_mesh("cpu", (me.size,))
    torch.manual_seed(11)
    made = [
        torch.nn.init.normal_(torch.distributed.tensor.empty(SHAPE, device_mesh=mesh)),
        F.dropout(torch.distributed.tensor.ones(SHAPE, device_mesh=mesh), 0.4),
    ]
    for each in made:
        theirs = [None] * me.size
        dist.all_gather_object(theirs, each.to_local())
        assert each.to_local().std() > 0.1
        assert all(torch.equal(theirs[0], other) for other in theirs)


def shard_dim_alltoall(me: Rank) -> None:
    """torch uses it on accelerators; on a CPU mesh it gathers all instead."""
    group = dist.group.WORLD.group_name
    whole = random(8, shape=(8, 12))
    mine = whole.chunk(me.size, 0)[me.rank].contiguous()
    moved = torch.ops._dtensor.shard_dim_alltoall(mine, 0, 1, group)
    assert_close(moved, whole.chunk(me.size, 1)[me.rank], "shards of columns")


@pytest.mark.parametrize(
    "function", [distribution, checked_locals, modules, random_operators, shard_dim_alltoall]
)
def test_distribution(function, tmp_path):
    run(function, 4, tmp_path)
