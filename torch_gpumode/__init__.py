"""PyTorch training on many GPUs that is fast and does not die when a peer does.

    torch.distributed.init_process_group(backend="gpumode")  # needs no import of this package
    torch_gpumode.distributed                                # abort, reconfigure, exceptions
    torch_gpumode.optim                                      # fused optimizers
    torch_gpumode.ops                                        # loads torch.ops.gpumode

Submodules are imported when they are first used. `import torch` itself imports this package, to
make the backend known (see _autoload.py), so nothing here may import torch.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = ("bench", "config", "distributed", "env", "ops", "optim", "triton_kernels")

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"torch_gpumode.{name}")
    raise AttributeError(f"module 'torch_gpumode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
