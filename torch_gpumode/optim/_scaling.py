"""What a GradScaler and clipping multiply gradients by, inside the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Returns what torch.nn.utils.clip_grad_norm_ multiplies gradients of this norm by."""
    if max_norm is None:
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient  # a NaN stays one


class Scaling:
    """What gradients are to be multiplied by, and whether one of them is known to be infinite.

    It comes from the attributes `grad_scale` and `found_inf`, which GradScaler.step sets on an
    optimizer, or from the GradScaler that the user gave to `step` instead of calling that.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self.factor = 1.0
        self.found_inf = False
        self._record: dict[str, Any] | None = None  # of this optimizer, in the scaler
        self.looks_for_inf = False
        if scaler is None:
            scale = getattr(optimizer, "grad_scale", None)
            found_inf = getattr(optimizer, "found_inf", None)
            self.factor = 1.0 if scale is None else 1.0 / float(scale)
            self.found_inf = found_inf is not None and bool(found_inf)
        elif scaler.is_enabled():
            scaler._check_scale_growth_tracker("step")
            record = scaler._per_optimizer_states[id(optimizer)]
            if record["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has already been called since the last update().")
            self._record = record
            if record["stage"] is OptState.UNSCALED:
                self.found_inf = any(map(bool, record["found_inf_per_device"].values()))
            else:
                self.looks_for_inf = True
                self.factor = 1.0 / float(scaler._scale)

    @property
    def is_by_scaler(self) -> bool:
        return self._record is not None

    def found(self, norm: float) -> None:
        """Learns from the norm of the gradients whether all of them are finite."""
        if self.looks_for_inf:
            self.found_inf = not math.isfinite(norm)

    def finish(self) -> None:
        """Tells the scaler that the step was made."""
        if self._record is None:
            return
        if self.looks_for_inf:
            found_inf = torch.tensor(float(self.found_inf))
            self._record["found_inf_per_device"] = {found_inf.device: found_inf}
        self._record["stage"] = OptState.STEPPED
