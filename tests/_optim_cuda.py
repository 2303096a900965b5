"""Parameters on a GPU, with gradients."""

from __future__ import annotations

import torch
from _optim import F32, parameter, randn
from torch.nn import Parameter


def make(dtype: torch.dtype = F32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [parameter(randn(size, dtype, generator).cuda()) for size in ((5, 7), (40_000,), ())]
    for param in made:
        param.grad = randn(param.shape, dtype, generator).cuda()
    return made
