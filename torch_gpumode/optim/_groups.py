"""The param groups of an optimizer, and their hyper-parameters where kernels read them."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_gpumode import _extension

if TYPE_CHECKING:
    from torch_gpumode.optim._fused import FusedOptimizer


class Group(dict[str, Any]):
    """A param group that tells its optimizer what changes; pickled and copied as a plain dict.

    Raises (on changes, once a graph reads what they change, and nothing was changed):
        ValueError: a hyper-parameter is wrong.
    """

    def __init__(self, optimizer: FusedOptimizer, items: dict[str, Any]) -> None:
        super().__init__(items)
        self._optimizer = weakref.ref(optimizer)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Changes several items, which are checked together."""
        changes = dict(*args, **kwargs)
        optimizer = self._optimizer()
        live = None if optimizer is None else optimizer._live
        if live is None:
            super().update(changes)
        else:
            live.change(self, changes)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def adopted(optimizer: FusedOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups as those of `optimizer`, the same objects where they are."""

    def is_own(group: dict[str, Any]) -> bool:
        return type(group) is Group and group._optimizer() is optimizer

    return [group if is_own(group) else Group(optimizer, group) for group in groups]


def hyper_values(optimizer: FusedOptimizer, group: dict[str, Any]) -> list[float]:
    """Returns the hyper-parameters of a group in the order of the optimizer's rule.

    Raises:
        ValueError: one makes no sense, or is not finite.
    """
    optimizer._check_group(group)
    by_name = optimizer._hyper(group)
    values = [float(by_name[name]) for name in _names(optimizer)]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"Invalid hyper-parameters: {by_name}: expected finite numbers")
    return values


def tensor_entries(optimizer: FusedOptimizer) -> list[tuple[int, int, Tensor]]:
    """Returns (row, column, tensor) of the hyper-parameters that are given as tensors."""
    found = []
    for row, group in enumerate(optimizer.param_groups):
        by_name = optimizer._hyper(group)
        for column, name in enumerate(_names(optimizer)):
            if isinstance(by_name[name], Tensor):
                found.append((row, column, by_name[name]))
    return found


def _reads(optimizer: FusedOptimizer, group: dict[str, Any]) -> Any:
    """Returns what a graph takes from a group besides numbers: states, and tensors, by identity."""
    tensors = [id(v) if isinstance(v, Tensor) else None for v in optimizer._hyper(group).values()]
    return optimizer._state_names(group), tensors


def _names(optimizer: FusedOptimizer) -> list[str]:
    names: list[str] = _extension.load().hyper_of_rule(optimizer._rule)
    return names


class LiveHyper:
    """The hyper-parameters of all groups on the devices that read them, for launches to come.

    A kernel that was compiled or captured into a graph reads them when it runs; so, once there is
    one (`is_in_graph`), they are written as soon as a group changes, in the order of the current
    stream; before, when somebody asks for them. Those that are given as tensors (`tensor_entries`)
    may change without a sign: who launches reads them itself (`read_tensors`), or calls `refresh`.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._tensors: dict[torch.device, Tensor] = {}
        self._is_current = False
        self.is_in_graph = False
        self.num_changes = 0  # of groups

    def tensor(self, device: torch.device) -> Tensor:
        """Returns [num_groups, MAX_HYPER], float64, on `device`: a row as the rule has them.

        It is the same tensor as long as the number of groups is.

        Raises:
            ValueError: a hyper-parameter is wrong.
        """
        if not self._is_current:
            self.refresh()
        if device not in self._tensors:
            rows = self._rows()
            self._tensors[device] = torch.empty(rows.shape, dtype=rows.dtype, device=device)
            self._write(self._tensors[device], rows)
        return self._tensors[device]

    def refresh(self) -> None:
        """Writes what the groups say now.

        Raises:
            ValueError: a hyper-parameter is wrong, and nothing was written.
        """
        rows = self._rows()
        for device, tensor in self._tensors.items():
            if tensor.shape != rows.shape:
                self._tensors[device] = torch.empty(rows.shape, dtype=rows.dtype, device=device)
            self._write(self._tensors[device], rows)
        optimizer = self._optimizer()
        assert optimizer is not None
        self._entries = tensor_entries(optimizer)
        self._numbers = self._on_cpu()
        values = [group[key] for group in optimizer.param_groups for key in optimizer._keys]
        self._lists = [(value, list(value)) for value in values if isinstance(value, list)]
        self._is_current = True

    def forget(self) -> None:
        """Says that groups may have changed."""
        self._is_current = False
        self.num_changes += 1

    def read_tensors(self, device: torch.device) -> None:
        """Reads what can change in place, so that a step on `device`, a CUDA device, has it.

        Raises:
            RuntimeError: one is on the CPU, and a CUDA graph, which could not see it change, is
                captured.
        """
        if any(now != then for now, then in self._lists):
            self.refresh()
        there = [(row, column, value) for row, column, value in self._entries if value.is_cuda]
        if len(there) < len(self._entries):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a hyper-parameter is a tensor on the CPU while a CUDA graph is captured, "
                    "which would not see it change: expected a number, or a tensor on the device"
                )
            if self._numbers != self._on_cpu():
                self.refresh()
        if there:
            hyper = self._tensors[device]
            with torch.no_grad():
                torch._foreach_copy_(
                    [hyper[row, column] for row, column, _ in there],
                    [value.detach().reshape(()) for _, _, value in there],
                    non_blocking=True,
                )

    def _on_cpu(self) -> list[float]:
        return [float(value) for _, _, value in self._entries if not value.is_cuda]

    def change(self, group: Group, changes: dict[str, Any]) -> None:
        """Changes items of a group, and what the devices have of it.

        Raises:
            ValueError: a hyper-parameter is wrong, and nothing was changed.
        """
        optimizer = self._optimizer()
        if optimizer is None or not changes.keys() & {*optimizer._keys, "params"}:
            return dict.update(group, changes)
        if not self.is_in_graph:
            self.forget()
            return dict.update(group, changes)
        row = next((i for i, g in enumerate(optimizer.param_groups) if g is group), None)
        if row is None:  # it was replaced
            return dict.update(group, changes)
        after = {**group, **changes}
        values = self._row(optimizer, after)
        is_other = "params" in changes or _reads(optimizer, after) != _reads(optimizer, group)
        dict.update(group, changes)
        self.num_changes += 1
        self._entries = tensor_entries(optimizer)
        self._numbers = self._on_cpu()
        for tensor in self._tensors.values():
            self._write(tensor[row], values)
        if is_other:
            optimizer._traced.renew()
        return None

    def _row(self, optimizer: FusedOptimizer, group: dict[str, Any]) -> Tensor:
        values = hyper_values(optimizer, group)
        padding = _extension.load().MAX_HYPER - len(values)
        return torch.tensor([*values, *[0.0] * padding], dtype=torch.float64, device="cpu")

    def _rows(self) -> Tensor:
        optimizer = self._optimizer()
        assert optimizer is not None
        return torch.stack([self._row(optimizer, group) for group in optimizer.param_groups])

    def _write(self, to: Tensor, values: Tensor) -> None:
        if to.is_cuda and torch.cuda.is_current_stream_capturing():
            _extension.load().copy_outside_capture(to, values)
            return
        # From pinned memory, so that the host need not wait: the allocator keeps it until then.
        values = values.pin_memory() if to.is_cuda else values
        with torch.no_grad():
            to.copy_(values, non_blocking=True)


def check_at_least_zero(group: dict[str, Any], **names: str) -> None:
    """Raises ValueError, in torch's words, for the first key whose value is negative."""
    for key, what in names.items():
        if not group[key] >= 0.0:
            raise ValueError(f"Invalid {what}: {group[key]}")


def check_betas(group: dict[str, Any]) -> None:
    if len(group["betas"]) != 2:
        raise ValueError(f"Invalid betas: {group['betas']}: expected two numbers")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
