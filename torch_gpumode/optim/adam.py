"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero, check_betas
from torch_gpumode.optim._precision import PrecisionOptions


class FusedAdam(FusedOptimizer):
    """torch.optim.Adam in one pass over memory.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015; amsgrad: Reddi et
    al., "On the Convergence of Adam and Beyond", 2018. What it computes is written out in
    torch_gpumode.optim.naive.adam.

    Args: as torch.optim.Adam, and those of FusedOptimizer.
    """

    _rule = "adam"
    _squares = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
    _keys = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "decoupled_weight_decay",
    )

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **precision)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group, lr="learning rate", eps="epsilon value", weight_decay="weight_decay value"
        )
        check_betas(group)

    def _needs_exact(self, group: dict[str, Any], name: str) -> bool:
        # The largest would be that of what rounding adds.
        return group["amsgrad"] and name != "exp_avg"

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
            "decoupled": group["decoupled_weight_decay"],
        }


class FusedAdamW(FusedAdam):
    """torch.optim.AdamW in one pass over memory.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. What it computes
    is written out in torch_gpumode.optim.naive.adam.

    Args: as torch.optim.AdamW, and those of FusedOptimizer.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=True,
            **options,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # also of a checkpoint from before torch had the key
            group["decoupled_weight_decay"] = True
