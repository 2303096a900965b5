"""What the C++ side knows of an optimizer, kept up to date."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_gpumode import _extension
from torch_gpumode.optim._dtensor import Sharded, local, local_grad
from torch_gpumode.optim._groups import hyper_values
from torch_gpumode.optim._scaling import Scaling

if TYPE_CHECKING:
    from torch_gpumode.optim._fused import FusedOptimizer

Group = dict[str, Any]


class ParamTables:
    """All that the C++ side knows of an optimizer: one table for each device."""

    def __init__(self, optimizer: FusedOptimizer, only: Collection[Tensor] | None) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if only is not None:
            chosen = set(only)
            params = [param for param in params if param in chosen]
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            by_device.setdefault(local(param).device, []).append(param)
        self._tables = {
            device: optimizer._make_table(device, there) for device, there in by_device.items()
        }

    def is_current(self) -> bool:
        """Returns whether this is still about the parameters that the optimizer has."""
        return all(table.is_current() for table in self._tables.values())

    def was_recorded(self) -> bool:
        """Returns whether a CUDA graph has recorded a step, and so needs this while it lives."""
        return any(table.was_recorded() for table in self._tables.values())

    def update_hyper(self) -> None:
        """Hands over the hyper-parameters of the groups in which one has changed."""
        for table in self._tables.values():
            table.update_hyper()

    def grad_sum(self, scaling: Scaling) -> tuple[Tensor, Tensor]:
        """Returns the squared norm of all gradients, and whether it is not finite, as 1 or 0.

        Collective over the meshes of parameters that are DTensors.
        """
        found = [table.grad_sum(scaling.on(device)) for device, table in self._tables.items()]
        if len(found) == 1:
            return found[0]
        total = torch.zeros((), dtype=torch.float64)
        if found:
            first = found[0][0].device
            total = torch.stack([each.to(first) for each, _ in found]).sum()
        return total, is_bad(total)

    def step(self, scaling: Scaling) -> None:
        """Updates all parameters that have a gradient.

        Collective as `grad_sum` where the step needs norms of whole tensors.
        """
        for device, table in self._tables.items():
            # On other devices that would have to be waited for.
            if device.type == "cpu" and scaling.found_inf:
                continue
            table.step(scaling.on(device))


class ParamTable:
    """Parameters of an optimizer on one device, their states, and the hyper-parameters of groups.

    It is made anew when groups or states were changed by others (`is_current`); tensors that were
    changed in place, their memory included, are seen by the C++ side itself.
    """

    def __init__(
        self, optimizer: FusedOptimizer, device: torch.device, params: Collection[Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._c = _extension.load()
        self._table = self._c.Table(optimizer._rule, device)
        precision = optimizer.precision
        self._table.set_rounding(precision.stochastic_rounding, precision.seed)
        groups = optimizer.param_groups
        self._watch = optimizer._watch
        self._params: list[Tensor] = []
        self._with_state: set[int] = set()
        self._group_of: list[Group] = []
        # This process's parts of those parameters that are DTensors: their gradients must be told.
        self._parts: dict[int, Tensor] = {}
        chosen = set(params)
        number = 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param in chosen:
                    self._add(param, index, number)
                number += 1
        self._sharded = Sharded(self._params, device)
        self._seen_params = [list(group["params"]) for group in groups]
        self._seen: list[tuple[Any, ...]] = [()] * len(groups)
        self._seen_states = list(map(optimizer._state_names, groups))
        self._hyper: Tensor | None = None  # on the device, and as of how many changes
        self._seen_changes = -1
        for index, param in enumerate(self._params):
            if optimizer.state.get(param):
                self._hand_over(index)
        self._num_changes = self._watch.num_changes  # which to hand over may add to

    def _add(self, param: Tensor, group: int, number: int) -> None:
        part = local(param)
        is_whole = part is param
        index = self._table.add(part, param if is_whole else None, group, number)
        self._params.append(param)
        self._group_of.append(self._optimizer.param_groups[group])
        if not is_whole:
            self._parts[index] = part

    def is_current(self) -> bool:
        """Returns whether this is still about the parameters that the optimizer has."""
        groups, watch = self._optimizer.param_groups, self._optimizer._watch
        if self._watch is not watch or self._num_changes != watch.num_changes:
            return False
        if len(groups) != len(self._seen_params):
            return False
        if any(local(self._params[index]) is not part for index, part in self._parts.items()):
            return False
        now = [group["params"] for group in groups]
        return all(map(self._c.same_objects, now, self._seen_params))

    def _hand_over(self, index: int) -> None:
        param, group = self._params[index], self._group_of[index]
        state = self._optimizer._complete(param, group)
        self._with_state.add(index)
        master, kind = None, self._c.Master.NONE
        if self._optimizer.precision.master_of(param.dtype) == "fp32":
            master, kind = state["master_param"], self._c.Master.F32
        elif self._optimizer.precision.master_of(param.dtype) == "remainder16":
            master, kind = state["remainder"], self._c.Master.REMAINDER16
        names = self._optimizer._state_names(group)
        self._table.set_state(
            index,
            step=state["step"],
            states=[local(state[name]) if name else None for name in names],
            master=None if master is None else local(master),
            kind=kind,
            scalar=self._scalar_of(index, state),
        )

    def _scalar_of(self, index: int, state: dict[str, Any]) -> Tensor | None:
        return state["exp_avg_sq"] if self._optimizer._has_scalar else None

    def update_hyper(self) -> None:
        """Hands over the hyper-parameters of the groups in which one has changed."""
        if self._device.type == "cpu":
            keys = self._optimizer._keys
            for number, group in enumerate(self._optimizer.param_groups):
                now = tuple([_number(group[key]) for key in keys])
                if now == self._seen[number]:
                    continue
                self._table.set_hyper(number, hyper_values(self._optimizer, group))
                self._seen[number] = now
                self._update_states(number, group)
            return
        live = self._optimizer._live_hyper()
        hyper = live.tensor(self._device)
        live.read_tensors(self._device)
        if hyper is not self._hyper:
            self._table.set_hyper_tensor(hyper)
            self._hyper = hyper
        if torch.cuda.is_current_stream_capturing():
            live.is_in_graph = True
        if live.num_changes != self._seen_changes:
            for number, group in enumerate(self._optimizer.param_groups):
                self._update_states(number, group)
            self._seen_changes = live.num_changes

    def _update_states(self, number: int, group: Group) -> None:
        """Hands over the states of a group in which others are needed now."""
        names = self._optimizer._state_names(group)
        if names == self._seen_states[number]:
            return
        for index in self._with_state:
            if self._group_of[index] is group:
                self._hand_over(index)
        self._seen_states[number] = names

    def _tell_grads(self) -> None:
        for index in self._parts:
            param = self._params[index]
            assert isinstance(param, DTensor)
            self._table.set_grad(index, local_grad(param))

    def _forget_grads(self) -> None:
        for index in self._parts:
            self._table.set_grad(index, None)

    def was_recorded(self) -> bool:
        """Returns whether a CUDA graph has recorded a step."""
        return bool(self._table.was_recorded())

    def grad_sum(self, scale: Any) -> tuple[Tensor, Tensor]:
        """Returns the squared norm of all gradients, and whether it is not finite, as 1 or 0.

        Collective over the meshes of parameters that are DTensors.
        """
        try:
            self._tell_grads()
            sums = self._table.grad_sums(scale, needs_each=bool(self._parts))
        finally:
            self._forget_grads()
        if not self._parts:
            return sums.total, sums.is_bad
        self._sharded.add_up(sums.each)
        total = sums.each.sum()
        return total, is_bad(total)

    def step(self, scale: Any) -> None:
        """Updates all parameters that have a gradient.

        Collective as `grad_sum` where the step needs norms of whole tensors.
        """
        try:
            self._tell_grads()
            missing = self._table.without_state()
            if missing and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{len(missing)} parameters have no state yet while a CUDA graph is captured, "
                    f"which would make it anew in each replay: expected a step before"
                )
            for index in missing:
                self._hand_over(index)
            self._finish(scale, self._start(scale))
        finally:
            self._forget_grads()

    def _start(self, scale: Any) -> Tensor | None:
        """All passes but the last; returns what was summed over each parameter, if anything."""
        sums: Tensor | None = self._table.start(scale)
        if sums is not None and self._parts:
            self._sharded.add_up(sums)
        return sums

    def _finish(self, scale: Any, sums: Tensor | None) -> None:
        self._table.finish(scale, sums)


def is_bad(total: Tensor) -> Tensor:
    """Returns whether a number is not finite, as 1 or 0."""
    return total.isfinite().logical_not().float()


def _number(value: Any) -> Any:
    """Returns a hyper-parameter as a number, so that one that changed in place is seen."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple([_number(v) for v in value])
    return value
