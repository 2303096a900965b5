"""Clipping gradients by their norm, in two passes over their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_gpumode import _extension
from torch_gpumode.optim._precision import DTYPES


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
            for dense gradients on cpu and cuda, and for the 2-norm; others, and all while
            torch.compile traces it, are left to torch.
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
    tables = _tables_of(grads)
    c = _extension.load()
    sums = [table.grad_sums(c.Scale(), needs_each=False).total for table in tables.values()]
    first = grads[0].device
    grad_sum = torch.stack([each.to(first) for each in sums]).sum() if len(sums) > 1 else sums[0]
    is_double = any(grad.dtype == torch.float64 for grad in grads)
    norm = grad_sum.sqrt().to(torch.float64 if is_double else torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            f"so it cannot be clipped. To disable this error and scale the gradients by the "
            f"non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    for device, table in tables.items():
        if device.type == "cpu" and grad_sum.sqrt() + 1e-6 <= max_norm:
            continue
        scale = c.Scale(grad_sum=grad_sum.to(device), max_norm=max_norm)
        table.finish(scale, table.start(scale))
    return norm


def _tables_of(grads: list[Tensor]) -> dict[torch.device, Any]:
    """Returns tables, by device, in which each gradient is its own parameter."""
    tables: dict[torch.device, Any] = {}
    c = _extension.load()
    for grad in grads:
        if grad.device not in tables:
            tables[grad.device] = c.Table("grads", grad.device)
        table = tables[grad.device]
        index = table.add(grad, None, 0, 0)
        table.set_grad(index, grad)
        table.set_state(index, step=None, states=[], master=None, kind=c.Master.NONE, scalar=None)
    return tables


def _is_ours(grad: Tensor) -> bool:
    is_plain = type(grad) is Tensor and grad.layout == torch.strided
    return is_plain and grad.device.type in ("cpu", "cuda") and grad.dtype in DTYPES
