"""What the C++ side knows of an optimizer, kept up to date."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_gpumode import _extension
from torch_gpumode.optim._dtensor import add_up, local, local_grad
from torch_gpumode.optim._groups import hyper_values

if TYPE_CHECKING:
    from torch_gpumode.optim._fused import FusedOptimizer

Group = dict[str, Any]


class ParamTable:
    """The parameters of an optimizer with their states, and its groups' hyper-parameters.

    It is made anew when groups or states were changed by others (`is_current`); tensors that were
    changed in place, their memory included, are seen by the C++ side itself.
    """

    def __init__(self, optimizer: FusedOptimizer, only: Collection[Tensor] | None) -> None:
        self._optimizer = optimizer
        self._c = _extension.load()
        self._table = self._c.Table(optimizer._rule)
        groups = optimizer.param_groups
        self._watch, self._num_changes = optimizer._watch, optimizer._watch.num_changes
        self._params: list[Tensor] = []
        self._with_state: set[int] = set()
        self._group_of: list[Group] = []
        # This process's parts of those parameters that are DTensors: their gradients must be told.
        self._parts: dict[int, Tensor] = {}
        chosen = None if only is None else set(only)
        number = 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                if chosen is None or param in chosen:
                    self._add(param, index, number)
                number += 1
        self._seen_params = [list(group["params"]) for group in groups]
        self._seen: list[tuple[Any, ...]] = [()] * len(groups)
        self._seen_states = list(map(optimizer._state_names, groups))
        for index, param in enumerate(self._params):
            if optimizer.state.get(param):
                self._hand_over(index)

    def _add(self, param: Tensor, group: int, number: int) -> None:
        part = local(param)
        if part.device.type != "cpu":
            raise RuntimeError(
                f"{type(self._optimizer).__name__}: a parameter is on {part.device}: this build "
                f"updates parameters on cpu"
            )
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
        same = self._c.same_objects
        return all(
            same(group["params"], seen)
            for group, seen in zip(groups, self._seen_params, strict=True)
        )

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
        keys = self._optimizer._keys
        precision = self._optimizer.precision
        for number, group in enumerate(self._optimizer.param_groups):
            now = tuple([_number(group[key]) for key in keys])
            if now == self._seen[number]:
                continue
            values = hyper_values(self._optimizer, group)
            self._table.set_hyper(number, values, precision.stochastic_rounding, precision.seed)
            self._seen[number] = now
            names = self._optimizer._state_names(group)
            if names == self._seen_states[number]:
                continue
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

    def grad_norm(self, factor: float) -> float:
        """Returns the norm of all gradients as one vector, times `factor`.

        Collective over the meshes of parameters that are DTensors.
        """
        try:
            self._tell_grads()
            sums = self._table.grad_sums(factor)
        finally:
            self._forget_grads()
        if self._parts:
            add_up(sums, self._params)
        # One after the other, so that what has no gradient does not change the bits.
        return math.sqrt(sums.cumsum(0)[-1:].sum().item())

    def step(self, factor: float) -> None:
        """Updates all parameters that have a gradient, which is multiplied by `factor` first.

        Collective as `grad_norm` where the step needs norms of whole tensors.
        """
        try:
            self._tell_grads()
            for index in self._table.without_state():
                self._hand_over(index)
            self._finish(factor, self._start(factor))
        finally:
            self._forget_grads()

    def _start(self, factor: float) -> Tensor | None:
        """All passes but the last; returns what was summed over each parameter, if anything."""
        sums: Tensor | None = self._table.start(factor)
        if sums is not None and self._parts:
            add_up(sums, self._params)
        return sums

    def _finish(self, factor: float, sums: Tensor | None) -> None:
        self._table.finish(factor, sums)


def _number(value: Any) -> Any:
    """Returns a hyper-parameter as a number, so that one that changed in place is seen."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple([_number(v) for v in value])
    return value
