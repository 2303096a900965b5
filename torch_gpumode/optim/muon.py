"""Muon."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torch_gpumode.optim._dtensor import local, with_part
from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero
from torch_gpumode.optim._precision import PrecisionOptions
from torch_gpumode.optim._state import one_number
from torch_gpumode.optim._table import ParamTable

ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


class FusedMuon(FusedOptimizer):
    """torch.optim.Muon: what is elementwise in two passes, matrices of one shape in one batch.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. What it
    computes is written out in torch_gpumode.optim.naive.muon; its Newton-Schulz iteration is in
    bfloat16, as torch's. A matrix that is a DTensor is gathered for it, and each process of its
    mesh computes all of it.

    Args: as torch.optim.Muon, and those of FusedOptimizer.

    Raises:
        ValueError: a parameter is no matrix.
    """

    _rule = "muon"
    _saves_step = False
    _keys = ("lr", "weight_decay", "momentum", "nesterov")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, **precision)

    def _make_table(self, device: torch.device, params: Collection[Tensor]) -> ParamTable:
        return _MuonTable(self, device, params)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group, lr="learning rate", momentum="momentum value", weight_decay="weight_decay value"
        )
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(
                f"Adjust learning rate function {group['adjust_lr_fn']} is not supported: expected "
                f"one of {ADJUSTMENTS}"
            )
        if len(group["ns_coefficients"]) != 3 or not 0 <= group["ns_steps"] < 100:
            raise ValueError(
                f"Invalid ns_coefficients or ns_steps: {group['ns_coefficients']}, "
                f"{group['ns_steps']}: expected three numbers, and fewer than 100 steps"
            )

    def _check_params(self, group: dict[str, Any]) -> None:
        super()._check_params(group)
        for param in group["params"]:
            if param.ndim != 2:
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: "
                    f"{param.size()}"
                )

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return None, "momentum_buffer"

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return group


class _MuonTable(ParamTable):
    """Makes directions orthogonal between the passes; they live as long as a step."""

    def _scalar_of(self, index: int, state: dict[str, Any]) -> Tensor:
        rows, columns = self._params[index].shape
        how = self._group_of[index]["adjust_lr_fn"]
        if how == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        elif how == "spectral_unclamped":
            factor = math.sqrt(rows / max(columns, 1))
        else:
            factor = math.sqrt(max(1.0, rows / max(columns, 1)))
        return one_number(factor, state["step"].device)

    def _start(self, scale: Any) -> Tensor | None:
        """The first pass, and Newton and Schulz's iteration."""
        alike = defaultdict(list)
        parts = []
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            if index in self._parts:
                parts.append(index)
            else:
                alike[param.shape, param.device, self._iteration(index)].append(index)
        batches = []
        for (shape, device, iteration), indices in alike.items():
            batch = torch.empty(len(indices), *shape, dtype=torch.bfloat16, device=device)
            batches.append((batch, iteration))
            for index, direction in zip(indices, batch.unbind(), strict=True):
                self._table.set_one_state(index, 0, direction)
        directions = [torch.empty_like(self._parts[i], dtype=torch.bfloat16) for i in parts]
        for index, direction in zip(parts, directions, strict=True):
            self._table.set_one_state(index, 0, direction)
        sums = super()._start(scale)
        for batch, iteration in batches:
            batch.copy_(newton_schulz(batch, *iteration))
        for index, direction in zip(parts, directions, strict=True):
            self._orthogonalize_part(index, direction)
        return sums

    def _finish(self, scale: Any, sums: Tensor | None) -> None:
        try:
            super()._finish(scale, sums)
        finally:
            for index in range(len(self._params)):
                self._table.set_one_state(index, 0, None)

    def _iteration(self, index: int) -> tuple[tuple[float, float, float], int, float]:
        group = self._group_of[index]
        return tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]

    def _orthogonalize_part(self, index: int, direction: Tensor) -> None:
        """The same for a matrix of which this process has a part; collective over its mesh."""
        param = self._params[index]
        assert isinstance(param, DTensor)
        mesh, everywhere = param.device_mesh, [Replicate()] * param.device_mesh.ndim
        whole = with_part(param, direction)
        assert isinstance(whole, DTensor)
        matrix = whole.redistribute(mesh, everywhere).to_local()
        matrix = newton_schulz(matrix[None], *self._iteration(index))[0].contiguous()
        whole = DTensor.from_local(matrix, mesh, everywhere, run_check=False)
        direction.copy_(local(whole.redistribute(mesh, param.placements)))


def newton_schulz(
    batch: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Returns matrices near the orthogonal ones that are nearest to those of `batch`.

    The singular values of the result lie around 1, between about 0.5 and 1.5.

    Args:
        batch: [n, rows, columns].
        coefficients: of x, x³ and x⁵ in the polynomial that each step applies to singular values.
        num_steps: how often.
        eps: the smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    is_tall = batch.size(-2) > batch.size(-1)
    x = batch.mT if is_tall else batch
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if is_tall else x
