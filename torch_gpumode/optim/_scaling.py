"""What a GradScaler and clipping multiply gradients by, inside the step, with nobody waiting."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from torch_gpumode import _extension


class Scaling:
    """What gradients are divided by, whether one of them is infinite, and what they are clipped to.

    It comes from the attributes `grad_scale` and `found_inf`, which GradScaler.step sets on an
    optimizer, or from the GradScaler that the user gave to `step` instead of calling that.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: Any = None, max_norm: float | None = None
    ) -> None:
        self._record: dict[str, Any] | None = None  # of this optimizer, in the scaler
        self._looks_for_inf = False
        self._max_norm = max_norm
        self._grad_sum: Tensor | None = None
        self._grad_scale: Any = None
        self._found_inf: Any = None
        if scaler is None:
            self._grad_scale = getattr(optimizer, "grad_scale", None)
            self._found_inf = getattr(optimizer, "found_inf", None)
        elif scaler.is_enabled():
            scaler._check_scale_growth_tracker("step")
            record = scaler._per_optimizer_states[id(optimizer)]
            if record["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has already been called since the last update().")
            self._record = record
            if record["stage"] is OptState.UNSCALED:
                self._found_inf = _any(record["found_inf_per_device"].values())
            else:
                self._looks_for_inf = True
                self._grad_scale = scaler._scale

    @property
    def is_by_scaler(self) -> bool:
        return self._record is not None

    @property
    def needs_grad_sum(self) -> bool:
        return self._max_norm is not None or self._looks_for_inf

    @property
    def found_inf(self) -> bool:
        """Whether a gradient is known to be infinite or NaN; waits for the device."""
        return self._found_inf is not None and bool(self._found_inf)

    def learn(self, grad_sum: Tensor, is_bad: Tensor) -> None:
        """Takes the squared norm of all gradients, and whether it is not finite, as 1 or 0."""
        self._grad_sum = grad_sum
        if self._looks_for_inf:
            self._found_inf = is_bad

    def on(self, device: torch.device) -> Any:
        """Returns it as a table on this device needs it."""
        return _extension.load().Scale(
            grad_scale=_number_on(device, self._grad_scale),
            found_inf=_number_on(device, self._found_inf),
            grad_sum=None
            if self._grad_sum is None or self._max_norm is None
            else self._grad_sum.to(device, non_blocking=True),
            max_norm=self._max_norm,
        )

    def finish(self) -> None:
        """Tells the scaler that the step was made."""
        if self._record is None:
            return
        if self._looks_for_inf:
            found_inf = _any([self._found_inf])
            self._record["found_inf_per_device"] = {found_inf.device: found_inf}
        self._record["stage"] = OptState.STEPPED


def _number_on(device: torch.device, value: Any) -> Tensor | None:
    if value is None:
        return None
    return torch.as_tensor(value).to(device, torch.float32, non_blocking=True)


def _any(found: Any) -> Tensor:
    """Returns whether one of these numbers is not 0, on the device of the first."""
    first, *others = map(torch.as_tensor, found)
    return functools.reduce(
        torch.maximum, [each.to(first.device, non_blocking=True) for each in others], first
    )
