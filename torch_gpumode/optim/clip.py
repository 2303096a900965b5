"""Clipping gradients by their norm, in two passes over their memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_gpumode import _extension
from torch_gpumode.optim._fused import DTYPES
from torch_gpumode.optim._scaling import clip_coefficient


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, one pass for the norm and one for the gradients.

    An optimizer of this package does it without the second: `optimizer.step(max_norm=...)`.

    Args:
        parameters: whose gradients are clipped, as if they were one vector. The fused passes are
            for dense gradients on cpu and for the 2-norm; others, and all while torch.compile
            traces it, are left to torch.
        max_norm: the largest norm that is left as it is.
        norm_type: of the norm.
        error_if_nonfinite: raise instead of clipping by a norm that is infinite or NaN.
        foreach: chooses among torch's implementations; nothing here.

    Returns:
        The norm before clipping: float32, or float64 if a gradient is.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    is_other = not grads or float(norm_type) != 2.0 or torch.compiler.is_compiling()
    if is_other or not all(map(_is_ours, grads)):
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    is_double = any(grad.dtype == torch.float64 for grad in grads)
    norm = _extension.load().grad_norm(grads)
    total = torch.tensor(norm, dtype=torch.float64 if is_double else torch.float32)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            f"so it cannot be clipped. To disable this error and scale the gradients by the "
            f"non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        _extension.load().scale_(grads, coefficient)
    return total


def _is_ours(grad: Tensor) -> bool:
    is_plain = type(grad) is Tensor and grad.layout == torch.strided
    return is_plain and grad.device.type == "cpu" and grad.dtype in DTYPES
