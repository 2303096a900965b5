"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero
from torch_gpumode.optim._precision import PrecisionOptions


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD in one pass over memory.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, in torch's form. What it computes is written out in torch_gpumode.optim.naive.sgd.

    Args: as torch.optim.SGD, and those of FusedOptimizer.
    """

    _rule = "sgd"
    _saves_step = False
    _keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, **precision)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group,
            lr="learning rate",
            momentum="momentum value",
            weight_decay="weight_decay value",
        )
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("momentum_buffer" if group["momentum"] else None,)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return group
