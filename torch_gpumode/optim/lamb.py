"""LAMB."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero, check_betas
from torch_gpumode.optim._precision import PrecisionOptions


class FusedLAMB(FusedOptimizer):
    """LAMB in two passes over memory: the moments and norms, and the step.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, with the options of Apex, but without its clipping: torch_gpumode.optim.clip_grad_norm_
    does that. What it computes is written out in torch_gpumode.optim.naive.lamb.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW.
        bias_correction: whether both averages are corrected for their start, as Adam's are.
        adam_w_mode: whether weight decay is added to the direction, or to the gradient.
        grad_averaging: whether the first average takes 1 - betas[0] of what comes, or all.
        use_nvlamb: whether the step is scaled by norm(parameter) / norm(direction) also in groups
            without weight decay.
        capturable: as torch.optim.Adam.
        master, stochastic_rounding, state_dtype, seed: as FusedOptimizer.
    """

    _rule = "lamb"
    _squares = frozenset({"exp_avg_sq"})
    _keys = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "grad_averaging",
        "adam_w_mode",
        "use_nvlamb",
        "maximize",
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults, **precision)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group, lr="learning rate", eps="epsilon value", weight_decay="weight_decay value"
        )
        check_betas(group)

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq"

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            **group,
            "beta1": beta1,
            "beta2": beta2,
            "decoupled": group["adam_w_mode"],
            "always_adapts": group["use_nvlamb"],
        }
