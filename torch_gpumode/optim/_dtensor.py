"""Parameters of which this process has a part: DTensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that is here: all of it unless it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor._local_tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def with_part(like: Tensor, part: Tensor) -> Tensor:
    """Returns the tensor that has this part here and is laid out as `like`, else what is given."""
    if not isinstance(like, DTensor):
        return part
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(
        part, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def local_grad(param: DTensor) -> Tensor | None:
    """Returns this process's part of a gradient, laid out over the mesh as its parameter is.

    Collective over the mesh if it is laid out otherwise, such as a sum that is still to be made.
    """
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, DTensor):
        raise RuntimeError(
            f"the gradient of a DTensor of shape {tuple(param.shape)} is none: expected a DTensor"
        )
    if grad.device_mesh != param.device_mesh or grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


class Sharded:
    """Which of some parameters are DTensors of which several processes have parts."""

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        """Takes the parameters in the same order on all processes, all parts on this device."""
        found = defaultdict(list)
        for i, param in enumerate(params):
            if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is None:
                continue
            dims = tuple(d for d, place in enumerate(param.placements) if not place.is_replicate())
            if dims:
                found[param.device_mesh, dims].append(i)
        # On the device, so that nothing waits for it; None: all.
        self._indices = {
            key: None if len(those) == len(params) else torch.tensor(those, device=device)
            for key, those in found.items()
        }

    def add_up(self, sums: Tensor) -> None:
        """Adds up over the meshes, in place, what each process has summed over its parts.

        Args:
            sums: [number of parameters, ...], float64.
        """
        for (mesh, dims), indices in self._indices.items():
            part = sums.contiguous() if indices is None else sums[indices]
            for dim in dims:
                dist.all_reduce(part, group=mesh.get_group(dim))
            if indices is None:
                sums.copy_(part)
            else:
                sums[indices] = part
