"""How exactly an optimizer keeps parameters and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

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
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"Invalid seed: {self.seed!r}: expected an int of at most 64 bits")

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
