"""Lion."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero, check_betas
from torch_gpumode.optim._precision import PrecisionOptions


class FusedLion(FusedOptimizer):
    """Lion in one pass over memory.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023. What it computes is
    written out in torch_gpumode.optim.naive.lion.

    Args:
        params, lr, betas, weight_decay, maximize: as torch.optim.AdamW; weight decay is decoupled.
            The update's elements are 1, 0 or -1, so that `lr` is three to ten times smaller than
            Adam's, and `weight_decay` as many times larger.
        capturable: as torch.optim.Adam.
        master, stochastic_rounding, state_dtype, seed: as FusedOptimizer.
    """

    _rule = "lion"
    _keys = ("lr", "betas", "weight_decay", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults, **precision)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(group, lr="learning rate", weight_decay="weight_decay value")
        check_betas(group)

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("exp_avg",)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {**group, "beta1": beta1, "beta2": beta2}
