"""How exactly an optimizer keeps parameters and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

MASTERS: tuple[str | None, ...] = (None, "fp32", "remainder16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (None, torch.float32, torch.bfloat16, torch.uint8)


class PrecisionOptions(TypedDict, total=False):
    """The arguments of Precision, which all optimizers take."""

    master: str | None
    stochastic_rounding: bool
    state_dtype: torch.dtype | None
    seed: int


@dataclass(frozen=True)
class Precision:
    """How exactly parameters and states are kept; FusedOptimizer says what each field means."""

    master: str | None = None
    stochastic_rounding: bool = False
    state_dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.master not in MASTERS:
            raise ValueError(f"Invalid master: {self.master!r}: expected one of {MASTERS}")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"Invalid state_dtype: {self.state_dtype}: expected one of {STATE_DTYPES}"
            )
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(
                f"Invalid stochastic_rounding: {self.stochastic_rounding!r}: expected True or False"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(
                f"Invalid seed: {self.seed!r}: expected an int of at least 0 and below 2**64"
            )

    def master_of(self, dtype: torch.dtype) -> str | None:
        """Returns where a parameter of this dtype has its exact value, if not in itself."""
        return self.master if dtype in (torch.bfloat16, torch.float16) else None

    def state_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of new states of a parameter of this dtype, unless they are packed."""
        if dtype == torch.float64:
            return dtype
        return torch.bfloat16 if self.state_dtype == torch.bfloat16 else torch.float32

    @property
    def packs(self) -> bool:
        """Returns whether states are of 8 bits."""
        return self.state_dtype == torch.uint8

    @property
    def uses_chance(self) -> bool:
        """Returns whether a step depends on random bits, and so on its number."""
        return self.stochastic_rounding or self.packs


def master_of(high: Tensor, remainder: Tensor) -> Tensor:
    """Returns what a bfloat16 parameter and its remainder are together, float32."""
    whole = (high.view(torch.int16).long() << 16) + remainder.long()
    return whole.int().view(torch.float32)


def remainder_of(high: Tensor, master: Tensor) -> Tensor:
    """Returns the remainder with which a bfloat16 parameter is its float32 master, int16.

    0 where the parameter is not what was rounded from it: then somebody has written it since.
    """
    low = master.view(torch.int32).long() - (high.view(torch.int16).long() << 16)
    is_rounded = low.abs() <= 1 << 15
    return torch.where(is_rounded, low.clamp(-(1 << 15), (1 << 15) - 1), 0).to(torch.int16)
