"""Adagrad."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_gpumode.optim._fused import FusedOptimizer, Params
from torch_gpumode.optim._groups import check_at_least_zero
from torch_gpumode.optim._precision import PrecisionOptions


class FusedAdagrad(FusedOptimizer):
    """torch.optim.Adagrad in one pass over memory.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", 2011. What it computes is written out in torch_gpumode.optim.naive.adagrad.

    Args: as torch.optim.Adagrad, and those of FusedOptimizer.
    """

    _rule = "adagrad"
    _squares = frozenset({"sum"})
    _keys = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, **precision)
        for group in self.param_groups:  # as torch does, before the first gradient
            for param in group["params"]:
                self._complete(param, group)

    def share_memory(self) -> None:
        """Moves the states into memory that forked processes share, as torch.optim.Adagrad does."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"].share_memory_()

    def _check_hyper(self, group: dict[str, Any]) -> None:
        check_at_least_zero(
            group,
            lr="learning rate",
            lr_decay="lr_decay value",
            weight_decay="weight_decay value",
            initial_accumulator_value="initial_accumulator_value value",
            eps="epsilon value",
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        return ("sum",)

    def _initial(self, name: str, group: dict[str, Any]) -> float:
        return group["initial_accumulator_value"]

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return group
