"""Random values of every dtype, and what reductions must make of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
MOVABLE = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX, torch.complex32, *FLOAT8]

# Relative to the sum of magnitudes: one rounding of the result, and of the inputs' sum in float32.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}

OPS: dict[str, tuple[Callable[[], ReduceOp], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (lambda: ReduceOp.SUM, lambda x: x.sum(0)),
    "avg": (lambda: ReduceOp.AVG, lambda x: x.mean(0)),
    "product": (lambda: ReduceOp.PRODUCT, lambda x: x.prod(0)),
    "min": (lambda: ReduceOp.MIN, lambda x: x.amin(0)),
    "max": (lambda: ReduceOp.MAX, lambda x: x.amax(0)),
    "premul_sum": (lambda: _premul(0.375), lambda x: 0.375 * x.sum(0)),
    "band": (lambda: ReduceOp.BAND, lambda x: _fold(torch.bitwise_and, x)),
    "bor": (lambda: ReduceOp.BOR, lambda x: _fold(torch.bitwise_or, x)),
    "bxor": (lambda: ReduceOp.BXOR, lambda x: _fold(torch.bitwise_xor, x)),
}
BITWISE = ("band", "bor", "bxor")


def _premul(factor: float) -> ReduceOp:
    make = getattr(dist, "_make_premul_sum", None) or dist._make_nccl_premul_sum
    return make(factor)


def _fold(op: Callable, stacked: torch.Tensor) -> torch.Tensor:
    result = stacked[0].clone()
    for each in stacked[1:]:
        result = op(result, each)
    return result


@functools.lru_cache(maxsize=64)
def random_tensor(count: int, dtype: torch.dtype, *key: int) -> torch.Tensor:
    """Returns data that any rank can make: the same for the same key. Not to be written to."""
    generator = torch.Generator().manual_seed(hash((count, *key)))
    if dtype in FLOATS + COMPLEX or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(count, generator=generator, dtype=wide).to(dtype)
    if dtype in FLOAT8:
        return torch.randn(count, generator=generator).to(dtype)
    high = 2 if dtype == torch.bool else 4  # products of four stay within int8
    return torch.randint(0, high, (count,), generator=generator, dtype=torch.int64).to(dtype)


def poisoned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns an output whose every byte must be overwritten."""
    return torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_reduced(result: torch.Tensor, inputs: list[torch.Tensor], op: str, what: str) -> None:
    """Compares with the definition: exactly for integers, to one rounding for floats."""
    dtype = result.dtype
    reference_of = OPS[op][1]
    if dtype in FLOATS + COMPLEX:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        stacked = torch.stack([x.to(wide) for x in inputs])
        reference = reference_of(stacked)
        scale = stacked.abs().prod(0) if op == "product" else stacked.abs().sum(0)
        real = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
        error = (result.to(wide) - reference).abs()
        smallest = torch.finfo(real).smallest_normal * torch.finfo(real).eps
        assert (error <= TOLERANCE[real] * len(inputs) * scale + smallest).all(), what
    else:
        stacked = torch.stack([x if dtype == torch.bool else x.to(torch.int64) for x in inputs])
        if op == "avg":  # rounds towards zero
            reference = stacked.sum(0) // len(inputs)
        else:  # of bools, a sum is "any" and a product is "all"
            reference = reference_of(stacked if op in BITWISE else stacked.to(torch.int64))
        assert torch.equal(result, reference.to(dtype)), what


def reductions() -> Iterator[tuple[str, torch.dtype]]:
    for op, dtype in itertools.product(OPS, [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]):
        refused = (
            (op in BITWISE and dtype in FLOATS + COMPLEX)
            or (op == "premul_sum" and dtype not in FLOATS)
            or (op in ("min", "max", "product") and dtype.is_complex)  # torch refuses product
            or (op == "avg" and dtype == torch.bool)
        )
        if refused:
            continue
        yield op, dtype


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def memory_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """The bytes of all tensors, alone or in lists, and what lies around those that are views."""
    flat = [each for arg in arguments for each in (arg if isinstance(arg, list) else [arg])]
    return [
        torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
        for each in flat
        if isinstance(each, torch.Tensor)
    ]
