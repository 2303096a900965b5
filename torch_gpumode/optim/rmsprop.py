"""RMSprop."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero
from torch_gpumode.optim._precision import PrecisionOptions


class FusedRMSprop(FusedOptimizer):
    """torch.optim.RMSprop in one pass over memory.

    Source: Hinton, lecture 6e of "Neural Networks for Machine Learning", 2012; centered: Graves,
    "Generating Sequences With Recurrent Neural Networks", 2013. What it computes is written out in
    torch_gpumode.optim.naive.rmsprop.

    Args: as torch.optim.RMSprop, and those of FusedOptimizer.
    """

    _rule = "rmsprop"
    _squares = frozenset({"square_avg"})
    _keys = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "centered": centered,
            "weight_decay": weight_decay,
            "capturable": capturable,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults, **precision)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group,
            lr="learning rate",
            eps="epsilon value",
            momentum="momentum value",
            weight_decay="weight_decay value",
            alpha="alpha value",
        )

    def _needs_exact(self, group: dict[str, Any], name: str) -> bool:
        # The variance is their difference, of which rounding each would leave nothing.
        return group["centered"] and name != "momentum_buffer"

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        )

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return group
