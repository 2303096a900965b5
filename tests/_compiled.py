"""The same parameters under an eager optimizer and under a compiled one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from _optim import F32, FUSED, bits, parameter, randn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_gpumode.optim import FusedOptimizer

SHAPES = [(7,), (5, 6), (), (2, 3, 4), (0, 3), (300,), (67, 80)]


class Pair:
    """The same parameters under two optimizers, one of which makes its steps compiled."""

    def __init__(
        self,
        name: str,
        dtypes: tuple[torch.dtype, ...] = (F32,),
        backend: str = "eager",
        step_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(len(repr((name, dtypes, options))))
        values = [
            randn(shape, dtypes[i % len(dtypes)], self.generator) for i, shape in enumerate(SHAPES)
        ]
        self.params = [[parameter(value.clone()) for value in values] for _ in range(2)]
        self.eager, self.compiled = self.optimizers = [
            FUSED[name]([{"params": params[:3]}, {"params": params[3:]}], **copy.deepcopy(options))
            for params in self.params
        ]
        self.step_options = step_options or {}
        self.backend = CompileCounterWithBackend(backend)
        compiled = self.compiled
        self.run: Callable[[], None] = torch.compile(
            lambda: compiled.step(**self.step_options), backend=self.backend, fullgraph=True
        )

    @property
    def num_graphs(self) -> int:
        return self.backend.frame_count

    def make_grads(self) -> None:
        for ours, theirs in zip(*self.params, strict=True):
            if ours.requires_grad:
                ours.grad = randn(ours.shape, ours.dtype, self.generator)
                theirs.grad = ours.grad.clone()

    def step(self) -> None:
        self.make_grads()
        self.eager.step(**self.step_options)
        self.run()
        self.check()

    def check(self) -> None:
        eager, compiled = (
            bits([params, optimizer.state_dict()["state"]])
            for params, optimizer in zip(self.params, self.optimizers, strict=True)
        )
        assert eager == compiled

    def change(self, change: Callable[[FusedOptimizer], Any]) -> list[Any]:
        return [change(optimizer) for optimizer in self.optimizers]
