"""States of 8 bits an element, with an exponent for each block: csrc/optim/blocks.h, in torch ops.

For what is not done in every step: new states, and checkpoints, which have float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128
# Smaller parameters are not worth it.
MIN_NUMEL = 4096

_SLICE = 2**20  # elements; a multiple of BLOCK
_SHIFT = 20  # the bits of a float's mantissa that are cut off
_MOST_EXPONENT, _NOT_FINITE = 253, 255


def _smallest_normal(is_squares: bool) -> int:
    """Returns the biased exponent of the smallest normal code of a block whose own is 127."""
    return 97 if is_squares else 113


def can_have_blocks(param: Tensor) -> bool:
    """Returns whether the states of a parameter, or of this process's part of it, are packed."""
    return param.numel() >= MIN_NUMEL and param.is_contiguous() and param.dtype != torch.float64


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _in_vectors(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _exponents_offset(numel: int) -> int:
    return _in_vectors(numel)


def _nbytes(numel: int) -> int:
    return _exponents_offset(numel) + _in_vectors(-(-numel // BLOCK))


def _slices(numel: int) -> Iterator[slice]:
    """Yields parts of a tensor of that many elements, so that what is made of them stays small."""
    for begin in range(0, numel, _SLICE):
        yield slice(begin, min(begin + _SLICE, numel))


def zeros(like: Tensor) -> Tensor:
    """Returns zeros in blocks for a tensor of the shape and device of `like`."""
    return torch.zeros(_nbytes(like.numel()), dtype=torch.uint8, device=like.device)


def pack(values: Tensor, is_squares: bool) -> Tensor:
    """Returns values in blocks; what `unpack` returned comes back as it was, else to the nearest.

    Args:
        values: any shape; float32, bfloat16 or float16.
        is_squares: none is negative, and has one bit of exponent more instead of a sign.

    Returns:
        [a byte for each element, and one for each block of 128; both in multiples of 16], uint8.
    """
    packed = zeros(values)
    codes, exponents = packed[: values.numel()], packed[_exponents_offset(values.numel()) :]
    flat = values.detach().reshape(-1)
    for part in _slices(values.numel()):
        found = _pack(flat[part].float(), is_squares)
        codes[part] = found[0]
        exponents[part.start // BLOCK : -(-part.stop // BLOCK)] = found[1]
    return packed


def _pack(x: Tensor, is_squares: bool) -> tuple[Tensor, Tensor]:
    smallest_normal = _smallest_normal(is_squares)
    num_blocks = -(-x.numel() // BLOCK)
    blocks = torch.nn.functional.pad(x, (0, num_blocks * BLOCK - x.numel())).view(-1, BLOCK)
    magnitudes = blocks.abs()
    largest = _bits(magnitudes).amax(1, keepdim=True)
    above = 1 if is_squares else 2  # codes: e4m3's last is NaN
    exponents = (largest.long() + (above << _SHIFT) - 1) >> 23
    is_finite = exponents <= _MOST_EXPONENT
    exponents = exponents.clamp(131 - smallest_normal, _MOST_EXPONENT)
    inverse = ((254 - exponents) << 23).int().view(torch.float32)
    scaled = torch.where(is_finite, magnitudes * inverse, 0.0)
    least = 2.0 ** (smallest_normal - 127)
    bits = torch.where(scaled < least, _bits(scaled + least) - (1 << 23), _bits(scaled))
    to_nearest = (1 << (_SHIFT - 1)) - 1 + (bits >> _SHIFT & 1)
    codes = ((bits + to_nearest) >> _SHIFT) - ((smallest_normal - 1) << (23 - _SHIFT))
    if is_squares:
        codes = torch.where((magnitudes > 0) & is_finite, codes.clamp(min=1), codes)
    else:
        codes = codes | torch.where(is_finite, _bits(blocks) >> 24 & 0x80, 0)
    exponents = torch.where(is_finite, exponents, _NOT_FINITE)
    return codes.reshape(-1)[: x.numel()].to(torch.uint8), exponents.reshape(-1).to(torch.uint8)


def unpack(packed: Tensor, like: Tensor, is_squares: bool) -> Tensor:
    """Returns what is in blocks, exactly: float32, contiguous, of the shape of `like`."""
    numel = like.numel()
    codes, exponents = packed[:numel], packed[_exponents_offset(numel) :]
    values = torch.empty(numel, dtype=torch.float32, device=packed.device)
    for part in _slices(numel):
        of_part = exponents[part.start // BLOCK : -(-part.stop // BLOCK)]
        values[part] = _unpack(codes[part].int(), of_part.int(), is_squares)
    return values.view(like.shape)


def _unpack(codes: Tensor, exponents: Tensor, is_squares: bool) -> Tensor:
    smallest_normal = _smallest_normal(is_squares)
    scales = torch.where(exponents == _NOT_FINITE, 0x7FC00000, exponents << 23)
    scales = scales.view(torch.float32).repeat_interleave(BLOCK)[: codes.numel()]
    magnitudes = codes if is_squares else codes & 0x7F
    bits = (magnitudes << _SHIFT) + ((smallest_normal - 1) << 23)
    subnormal = (bits + (1 << 23)).view(torch.float32) - 2.0 ** (smallest_normal - 127)
    is_subnormal = magnitudes >> (23 - _SHIFT) == 0
    values = torch.where(is_subnormal, subnormal, bits.view(torch.float32)) * scales
    if is_squares:
        return values
    return (_bits(values) | (codes & 0x80) << 24).view(torch.float32)


def are_blocks(state: object) -> bool:
    """Returns whether a state is in blocks, of whatever parameter."""
    return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.dim() == 1


def are_blocks_of(state: Tensor, param: Tensor) -> bool:
    """Returns whether a state is in as many blocks as a parameter has."""
    return are_blocks(state) and state.numel() == _nbytes(param.numel())
