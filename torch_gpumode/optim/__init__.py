"""Fused optimizers: drop-in for torch.optim, one pass over the memory of all tensors.

optimizer = torch_gpumode.optim.FusedAdamW(model.parameters(), lr=1e-3)

FusedAdam, FusedAdamW, FusedSGD, FusedAdagrad, FusedRMSprop and FusedMuon take the arguments of
their namesakes in torch.optim, and each loads the other's state_dict. FusedLion, FusedLAMB and
FusedNovoGrad have none there. What all of them take besides is in the docstring of FusedOptimizer;
what exactly each computes is in torch_gpumode.optim.naive.

`clip_grad_norm_` is torch.nn.utils', and
`optimizer.step(max_norm=..., scaler=...)` clips and unscales inside the step. `attach` makes steps
inside backward. torch.compile traces `step` and `zero_grad`, also with forward and backward.
"""

from torch_gpumode.optim._fused import FusedOptimizer
from torch_gpumode.optim.adagrad import FusedAdagrad
from torch_gpumode.optim.adam import FusedAdam, FusedAdamW
from torch_gpumode.optim.attach import Attached, attach
from torch_gpumode.optim.clip import clip_grad_norm_
from torch_gpumode.optim.lamb import FusedLAMB
from torch_gpumode.optim.lion import FusedLion
from torch_gpumode.optim.muon import FusedMuon
from torch_gpumode.optim.novograd import FusedNovoGrad
from torch_gpumode.optim.rmsprop import FusedRMSprop
from torch_gpumode.optim.sgd import FusedSGD

__all__ = [
    "Attached",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedLion",
    "FusedMuon",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedRMSprop",
    "FusedSGD",
    "attach",
    "clip_grad_norm_",
]
