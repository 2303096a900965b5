"""NovoGrad."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero, check_betas
from torch_gpumode.optim._precision import PrecisionOptions


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad in two passes over memory: the gradients' norms, and the step.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", 2019, with the options of Apex. What it computes is written out in
    torch_gpumode.optim.naive.novograd.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch.optim.Adam. The second beta is
            for the squared norm of each tensor's gradient: `state["exp_avg_sq"]`, one number.
        bias_correction: whether both averages are corrected for their start, as Adam's are.
        reg_inside_moment: True: as in the paper, the first average is of the normalised gradient
            with weight decay. False: it is of the gradient; it is normalised, and weight decay
            added, where it is used.
        grad_averaging: whether the first average takes 1 - betas[0] of what comes, or all.
        init_zero: whether the second average starts from 0, or from the first squared norm.
        capturable: as torch.optim.Adam.
        master, stochastic_rounding, state_dtype, seed: as FusedOptimizer.
    """

    _rule = "novograd"
    _has_scalar = True
    _keys = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "grad_averaging",
        "reg_inside_moment",
        "init_zero",
        "maximize",
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        init_zero: bool = False,
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
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "init_zero": init_zero,
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
        return ("exp_avg",)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        inside = group["reg_inside_moment"]
        return {**group, "beta1": beta1, "beta2": beta2, "inside_moment": inside}
