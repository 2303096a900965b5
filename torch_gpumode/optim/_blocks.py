"""States of 8 bits an element, with an exponent for each block: csrc/optim/blocks.h, in torch ops.

For what is not done in every step: new states, and checkpoints, which have float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
# Smaller parameters are not worth it.
MIN_NUMEL = 4096

_LEAST_EXPONENT = 32
_NOT_FINITE = 255
_SMALLEST_NORMAL = 113


def can_have_blocks(param: Tensor) -> bool:
    """Returns whether the states of a parameter, or of this process's part of it, are packed."""
    return param.numel() >= MIN_NUMEL and param.is_contiguous() and param.dtype != torch.float64


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _num_mantissa_bits(is_squares: bool) -> int:
    return 4 if is_squares else 3


def _exponents_offset(numel: int) -> int:
    return -(-numel // 16) * 16


def pack(values: Tensor, is_squares: bool) -> Tensor:
    """Returns values in blocks; what `unpack` returned comes back as it was, else to the nearest.

    Args:
        values: contiguous, float; any shape.
        is_squares: none is negative, and the root is what is kept.

    Returns:
        [a byte each, up to a multiple of 16, and one for each block of 128], uint8.
    """
    shift = 23 - _num_mantissa_bits(is_squares)
    numel = values.numel()
    num_blocks = -(-numel // BLOCK)
    x = values.detach().float().reshape(-1)
    blocks = torch.nn.functional.pad(x, (0, num_blocks * BLOCK - numel)).view(num_blocks, BLOCK)
    # torch's sqrt of float32 on the CPU may be off in the last bit.
    magnitudes = blocks.double().sqrt().float() if is_squares else blocks.abs()
    largest = (_bits(magnitudes) & 0x7FFFFFFF).amax(1, keepdim=True)
    exponents = (largest.long() + (1 << shift) - 1) >> 23
    is_finite = exponents < 254
    exponents = exponents.clamp(min=_LEAST_EXPONENT)
    inverse = ((254 - exponents.clamp(max=253)) << 23).int().view(torch.float32)
    scaled = torch.where(is_finite, magnitudes * inverse, 0.0)
    first_normal = torch.tensor(_SMALLEST_NORMAL << 23, dtype=torch.int32).view(torch.float32)
    bits = torch.where(
        scaled < first_normal.item(),
        _bits(scaled + first_normal.item()) - (1 << 23),
        _bits(scaled),
    )
    to_nearest = (1 << (shift - 1)) - 1 + (bits >> shift & 1)
    codes = ((bits + to_nearest) >> shift) - ((_SMALLEST_NORMAL - 1) << (23 - shift))
    if is_squares:
        codes = torch.where((magnitudes > 0) & is_finite, codes.clamp(min=1), codes)
    else:
        codes = codes | torch.where(is_finite, _bits(blocks) >> 24 & 0x80, 0)
    offset = _exponents_offset(numel)
    packed = torch.zeros(offset + num_blocks, dtype=torch.uint8, device=values.device)
    packed[:numel] = codes.reshape(-1)[:numel]
    packed[offset:] = torch.where(is_finite, exponents, _NOT_FINITE).reshape(-1)
    return packed


def unpack(packed: Tensor, like: Tensor, is_squares: bool) -> Tensor:
    """Returns what is in blocks, exactly: float32, of the shape of `like`."""
    shift = 23 - _num_mantissa_bits(is_squares)
    numel = like.numel()
    offset = _exponents_offset(numel)
    codes = packed[:numel].int()
    exponents = packed[offset:].int()
    scales = torch.where(exponents == _NOT_FINITE, 0x7FC00000, exponents << 23)
    scales = scales.view(torch.float32).repeat_interleave(BLOCK)[:numel]
    magnitudes = codes if is_squares else codes & 0x7F
    bits = (magnitudes << shift) + ((_SMALLEST_NORMAL - 1) << 23)
    first_normal = torch.tensor(_SMALLEST_NORMAL << 23, dtype=torch.int32).view(torch.float32)
    subnormal = (bits + (1 << 23)).view(torch.float32) - first_normal.item()
    is_subnormal = magnitudes >> (23 - shift) == 0
    values = torch.where(is_subnormal, subnormal, bits.view(torch.float32)) * scales
    if is_squares:
        values = values * values
    else:
        values = (_bits(values) | (codes & 0x80) << 24).view(torch.float32)
    return values.view(like.shape)


def is_packed(state: object, param: Tensor) -> bool:
    """Returns whether a state of this parameter is in blocks."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        return False
    numel = param.numel()
    return state.numel() == _exponents_offset(numel) + -(-numel // BLOCK)
