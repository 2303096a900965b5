"""Attention over a sequence that the ranks share, forward and backward.

torch's context_parallel() knows the attention kernels of accelerators only. What it does with them,
rotating keys and values around the ring, is called here with the CPU's kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import Rank, run
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _cp_options,
    _HeadTailLoadBalancer,
    context_parallel_unshard,
    set_rotate_method,
)
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
    flex_cp_allgather,
)

BATCH, NUM_HEADS, HEAD_DIM, SEQUENCE = 2, 12, 4, 2  # dimensions of what attention takes, but one
kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def whole_tensors(length: int) -> list[torch.Tensor]:
    """Queries, keys, values, and what the outputs are weighted with in the loss."""
    torch.manual_seed(3)
    return [torch.randn(BATCH, NUM_HEADS, length, HEAD_DIM) for _ in range(4)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        ours.double(), theirs, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}"
    )


def check(me: Rank, attention: Attention, causal: bool, balanced: bool = False) -> None:
    """Compares attention on this rank's part of the sequence with attention on all of it."""
    mesh = init_device_mesh("cpu", (me.size,))
    length = 4 * me.size
    balancer = _HeadTailLoadBalancer(length, me.size, "cpu") if balanced else None
    wholes = whole_tensors(length)
    *inputs, weight = (
        part.clone()
        for part in _context_parallel_shard(mesh, wholes, [SEQUENCE] * 4, load_balancer=balancer)
    )
    assert weight.shape[SEQUENCE] == 4
    for each in inputs:
        each.requires_grad_()
    output = attention(*inputs)
    (output * weight).sum().backward()
    ours = [output.detach(), *(each.grad for each in inputs)]
    ours = context_parallel_unshard(mesh, ours, [SEQUENCE] * 4, load_balancer=balancer)

    *inputs, weight = (each.double() for each in wholes)
    for each in inputs:
        each.requires_grad_()
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    (expected * weight).sum().backward()
    theirs = [expected.detach(), *(each.grad for each in inputs)]
    for name, a, b in zip(["output", "dq", "dk", "dv"], ours, theirs, strict=True):
        assert_close(a, b, f"{name}, causal={causal}, balanced={balanced}")


class Ring(torch.autograd.Function):
    """torch's ring attention, with the kernels of the CPU."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool):
        out, lse = _templated_ring_attention(
            dist.group.WORLD, SEQUENCE, kernel, q, k, v, is_causal=causal
        )
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _templated_ring_attention_backward(
            dist.group.WORLD,
            SEQUENCE,
            kernel_backward,
            grad_out,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            ctx.causal,
            dropout_p=0.0,
        )
        return *gradients, None


def rings(me: Rank) -> None:
    for method, causal in itertools.product(("allgather", "alltoall"), (True, False)):
        set_rotate_method(method)
        for balanced in (True, False) if causal else (False,):
            check(me, lambda q, k, v, c=causal: Ring.apply(q, k, v, c), causal, balanced)
            assert _cp_options.enable_load_balance == balanced


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring(size, tmp_path):
    run(rings, size, tmp_path)


def gathered(me: Rank) -> None:
    """Each rank gathers all keys and values, as torch does for flex_attention."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        keys, values = flex_cp_allgather(k, v, SEQUENCE, dist.group.WORLD.group_name)
        position = torch.arange(keys.shape[SEQUENCE])
        seen = position <= position.chunk(me.size)[me.rank].unsqueeze(1)
        mask = seen if causal else torch.ones_like(seen)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    for causal in (True, False):
        check(me, lambda q, k, v, c=causal: attention(q, k, v, c), causal)


def heads_for_sequence(me: Rank) -> None:
    """Ulysses: ranks exchange, so that each has the whole sequence, of some of the heads."""

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)

    def to_heads(x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(x.chunk(me.size, 1))
        return torch.cat([*exchange(parts).unbind()], SEQUENCE)

    def to_sequence(x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(x.chunk(me.size, SEQUENCE))
        return torch.cat([*exchange(parts).unbind()], 1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (to_heads(x) for x in (q, k, v))
        return to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=causal))

    for causal in (True, False):
        check(me, lambda q, k, v, c=causal: attention(q, k, v, c), causal)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", [gathered, heads_for_sequence])
def test_exchange(function, size, tmp_path):
    run(function, size, tmp_path)


def buffers(me: Rank) -> None:
    """context_parallel() shards buffers, and gives them back."""
    mesh = init_device_mesh("cpu", (me.size,))
    *inputs, _ = whole_tensors(4 * me.size)
    kept = [each.clone() for each in inputs]
    with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[SEQUENCE] * 3):
        assert all(each.shape[SEQUENCE] == 4 for each in inputs)
        unsharded = context_parallel_unshard(mesh, inputs, [SEQUENCE] * 3)
        assert all(map(torch.equal, unsharded, kept))
    assert all(map(torch.equal, inputs, kept))


def test_buffers(tmp_path):
    run(buffers, 3, tmp_path)
