"""torch.compile: collectives in a graph give what they give outside, which is the true value."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch._inductor.pattern_matcher  # else each rank that compiles imports it, for a second
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _ranks import Rank, run
from torch.distributed.device_mesh import init_device_mesh

Tensors = list[torch.Tensor]
# What a rank calls, with its input and the group; and what it must get, from everybody's inputs.
Case = tuple[Callable[[torch.Tensor, dist.ProcessGroup], object], Callable[[Tensors, int], object]]


def given(rank: int, size: int, step: int = 0) -> torch.Tensor:
    """Both dimensions divide by the number of ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 * size, 3 * size, generator=generator, dtype=torch.float64)


def total(xs: Tensors) -> torch.Tensor:
    return torch.stack(xs).sum(0)


def uneven(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One row to rank 0, two to rank 1, and so on."""
    sent = list(range(1, group.size() + 1))
    received = [group.rank() + 1] * group.size()
    return funcol.all_to_all_single(x[: sum(sent)] * 1, received, sent, group)


def uneven_truth(xs: Tensors, rank: int) -> torch.Tensor:
    start = rank * (rank + 1) // 2
    return torch.cat([x[start : start + rank + 1] for x in xs])


def exchanged(xs: Tensors, rank: int) -> torch.Tensor:
    return torch.cat([x.chunk(len(xs))[rank] for x in xs])


def ring(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Of one dimension, as torch counts elements where it means rows."""
    to = [(rank + 1) % group.size() for rank in range(group.size())]
    return funcol.permute_tensor(x.flatten(), to, group)


def pair(x: torch.Tensor) -> Tensors:
    return [x, x.float() * 3]


FUNCTIONAL: dict[str, Case] = {
    "all_reduce": (lambda x, g: funcol.all_reduce(x, "sum", g), lambda xs, r: total(xs)),
    "all_reduce avg": (
        lambda x, g: funcol.all_reduce(x, "avg", g),
        lambda xs, r: total(xs) / len(xs),
    ),
    "all_reduce max": (
        lambda x, g: funcol.all_reduce(x, "max", g),
        lambda xs, r: torch.stack(xs).amax(0),
    ),
    "all_gather": (lambda x, g: funcol.all_gather_tensor(x, 0, g), lambda xs, r: torch.cat(xs)),
    "all_gather columns": (
        lambda x, g: funcol.all_gather_tensor(x, 1, g),
        lambda xs, r: torch.cat(xs, 1),
    ),
    "reduce_scatter": (
        lambda x, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
        lambda xs, r: total(xs).chunk(len(xs))[r],
    ),
    "reduce_scatter columns": (
        lambda x, g: funcol.reduce_scatter_tensor(x, "avg", 1, g),
        lambda xs, r: (total(xs) / len(xs)).chunk(len(xs), 1)[r],
    ),
    "all_to_all": (lambda x, g: funcol.all_to_all_single(x, None, None, g), exchanged),
    "all_to_all uneven": (uneven, uneven_truth),
    "permute": (ring, lambda xs, r: xs[r - 1].flatten()),
    "broadcast": (lambda x, g: funcol.broadcast(x, 1, g), lambda xs, r: xs[1]),
    "all_reduce coalesced": (
        lambda x, g: funcol.all_reduce_coalesced(pair(x), "sum", g),
        lambda xs, r: pair(total(xs)),
    ),
    "all_gather coalesced": (
        lambda x, g: funcol.all_gather_into_tensor_coalesced(pair(x), g),
        lambda xs, r: pair(torch.cat(xs)),
    ),
    "reduce_scatter coalesced": (
        lambda x, g: funcol.reduce_scatter_tensor_coalesced(pair(x), "sum", [0, 0], g),
        lambda xs, r: pair(total(xs).chunk(len(xs))[r]),
    ),
}

if torch.__version__ < "2.14":  # which traces all of it
    del FUNCTIONAL["all_gather columns"]


def in_place(call: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]) -> Callable:
    """Of the older functions, which compile rewrites: the output is one of the shape of the sum."""

    def run_it(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        output = x.clone()
        call(output, x, group)
        return output * 2

    return run_it


def gather_list(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    outputs = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(outputs, x, group=group)
    return torch.cat(outputs)


def gather_single(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    output = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    dist.all_gather_into_tensor(output, x, group=group)
    return output + 1


def scatter_single(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    output = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    dist.reduce_scatter_tensor(output, x, group=group)
    return output + 1


OLDER: dict[str, Case] = {
    "dist.all_reduce": (
        in_place(lambda output, x, g: dist.all_reduce(output, group=g)),
        lambda xs, r: total(xs) * 2,
    ),
    "dist.all_to_all_single": (
        in_place(lambda output, x, g: dist.all_to_all_single(output, x, group=g)),
        lambda xs, r: exchanged(xs, r) * 2,
    ),
    "dist.all_gather": (gather_list, lambda xs, r: torch.cat(xs)),
    "dist.all_gather_into_tensor": (gather_single, lambda xs, r: torch.cat(xs) + 1),
    "dist.reduce_scatter_tensor": (
        scatter_single,
        lambda xs, r: total(xs).chunk(len(xs))[r] + 1,
    ),
}


def between(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Several are in flight at once, and are needed in another order."""
    first = funcol.all_reduce(x.sin(), "sum", group)
    second = funcol.all_gather_tensor(x[:2], 0, group)
    third = funcol.reduce_scatter_tensor(x.cos(), "sum", 0, group)
    return third.sum() + second.exp().mean() * first.tanh()


def between_truth(xs: Tensors, rank: int) -> torch.Tensor:
    third = total([x.cos() for x in xs]).chunk(len(xs))[rank]
    second = torch.cat([x[:2] for x in xs])
    return third.sum() + second.exp().mean() * total([x.sin() for x in xs]).tanh()


def reduce_twice(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return funcol.all_reduce(funcol.all_reduce(x, "sum", group) / 3, "max", group) - x


# These have a backward, which is checked too.
DIFFERENTIABLE: dict[str, Case] = {
    "all_reduce with backward": FUNCTIONAL["all_reduce"],
    "all_gather with backward": (
        lambda x, g: funcol.all_gather_tensor_autograd(x.sin(), 0, g),
        lambda xs, r: torch.cat([x.sin() for x in xs]),
    ),
    "reduce_scatter with backward": (
        lambda x, g: funcol.reduce_scatter_tensor_autograd(x.sin(), "sum", 0, g),
        lambda xs, r: total([x.sin() for x in xs]).chunk(len(xs))[r],
    ),
    "all_to_all with backward": (
        lambda x, g: funcol.all_to_all_single_autograd(x.sin(), [2] * g.size(), [2] * g.size(), g),
        lambda xs, r: exchanged([x.sin() for x in xs], r),
    ),
    "between with backward": (between, between_truth),
}
FAMILIES = {
    "functional": FUNCTIONAL,
    "older": OLDER,
    "differentiable": DIFFERENTIABLE,
    "several": {
        "between": (between, between_truth),
        "twice": (reduce_twice, lambda xs, r: total(xs) / 3 - xs[r]),
    },
}


def as_list(value: object) -> Tensors:
    tensors = value if isinstance(value, list | tuple) else [value]
    return [funcol.wait_tensor(each) * 1 for each in tensors]


def gradient(call: Callable[[], object], x: torch.Tensor, weights: Tensors) -> torch.Tensor:
    outputs = as_list(call())
    loss = sum((w * y).sum() for w, y in zip(weights, outputs, strict=True))
    return torch.autograd.grad(loss, x)[0]


def check(case: Case, backend: str, group: dist.ProcessGroup) -> None:
    call, truth = case
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for step in range(2):
        xs = [given(r, size, step) for r in range(size)]
        expected = as_list(truth(xs, rank))
        for each in (call, compiled):
            got = as_list(each(xs[rank].clone(), group))
            for ours, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        if case not in DIFFERENTIABLE.values():
            continue
        for x in xs:
            x.requires_grad_()
        outputs = [as_list(truth(xs, r)) for r in range(size)]
        weights = [[y.detach().cos() + r for y in ys] for r, ys in enumerate(outputs)]
        loss = sum(
            (w * y).sum()
            for ws, ys in zip(weights, outputs, strict=True)
            for w, y in zip(ws, ys, strict=True)
        )
        wanted = torch.autograd.grad(loss, xs[rank])[0]
        for each in (call, compiled):
            x = xs[rank].detach().clone().requires_grad_()
            got = gradient(lambda each=each, x=x: each(x, group), x, weights[rank])
            torch.testing.assert_close(got, wanted)


def check_all(family: str, backend: str, group: dist.ProcessGroup) -> None:
    for name, case in FAMILIES[family].items():
        try:
            check(case, backend, group)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise


def in_the_world(me: Rank, family: str, backend: str) -> None:
    if backend == "inductor":  # each rank compiles for itself, in itself
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(me.folder / f"inductor{me.rank}")
        torch._inductor.config.compile_threads = 1
    check_all(family, backend, dist.group.WORLD)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_collectives(family, size, tmp_path):
    run(in_the_world, size, tmp_path, family, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor(family, tmp_path):
    run(in_the_world, 2, tmp_path, family, "inductor", limit_s=600, timeout_s=300)


def in_a_subgroup(me: Rank) -> None:
    group = dist.new_group([1, 2])
    if me.rank > 0:
        check_all("several", "aot_eager", group)


def by_mesh(me: Rank) -> None:
    """A group may be named by a mesh and a dimension of it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: torch.Tensor) -> torch.Tensor:
        return (
            funcol.all_reduce(x, "sum", (mesh, 1)) + funcol.all_gather_tensor(x, 0, mesh["b"])[:4]
        )

    xs = [given(rank, 2) for rank in range(2)]
    torch.testing.assert_close(call(xs[me.rank]), total(xs) + xs[0])


def of_any_size(me: Rank) -> None:
    """Sizes are symbols in the graph."""
    call, truth = between, between_truth
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (1, 2, 5):
        xs = [given(rank, 2).repeat(rows, 1) for rank in range(2)]
        torch.testing.assert_close(compiled(xs[me.rank], dist.group.WORLD), truth(xs, me.rank))


@pytest.mark.parametrize(("function", "size"), [(in_a_subgroup, 3), (by_mesh, 2), (of_any_size, 2)])
def test_graph(function, size, tmp_path):
    run(function, size, tmp_path)
