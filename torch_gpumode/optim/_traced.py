"""The step as torch.compile traces it: one op over lists of tensors.

What a graph is made for, and cannot change while it is used, is told to Dynamo as a string that
guards it; all else are inputs of the graph. Nothing here reads a number of a param group while it
is traced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from torch_gpumode import _extension
from torch_gpumode.optim._groups import tensor_entries

if TYPE_CHECKING:
    from torch_gpumode.optim._fused import FusedOptimizer

# Of one op: the time that Inductor takes for an op grows with the square of its tensors.
MAX_PARAMS = 64

_numbers = itertools.count()
_by_token: weakref.WeakValueDictionary[str, Traced] = weakref.WeakValueDictionary()


class Traced:
    """What the traced step of one optimizer reads: the inputs of its graph."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.token = f"{type(optimizer).__name__} {next(_numbers)}"
        self._optimizer = weakref.ref(optimizer)
        _by_token[self.token] = self
        # Whether the rest is about what the optimizer has now.
        self.is_current = False
        self.is_used = False
        # All that a graph is made for, besides which parameters have a gradient.
        self.made_for = ""
        self.why_not = ""  # it cannot be traced
        # The optimizer's own list of groups, their own of parameters, and what was in those.
        self.groups: list[dict[str, Any]] = []
        self.lists: list[list[Tensor]] = []
        self.params: list[list[Tensor]] = []
        # For each parameter in order, once it has a state.
        self.steps: list[Tensor | None] = []
        self.states: list[list[Tensor]] = []
        self.masters: list[list[Tensor]] = []
        self.scalars: list[list[Tensor]] = []
        self.hyper: Tensor | None = None
        self._zeroed_in: weakref.ref[TracingContext] | None = None
        # What a step leaves behind: here, because Dynamo drops what is set on an optimizer.
        self.grad_sum: Tensor | None = None
        self.tensor_hyper: list[Tensor] = []
        self._present: list[int] = []
        self._groups: list[int] = []

    def invalidate(self) -> None:
        """Says that the next step must be traced again."""
        self.is_current = False

    def renew(self) -> None:
        """Looks at the optimizer again, if a graph has been made."""
        if self.is_used:
            self._build()

    def prepare(self) -> None:
        optimizer = self._get()
        _extension.load()
        optimizer._opt_called = True
        self.is_used = True
        if not self.is_current or not self._has_params(optimizer):
            self._build()

    def complete(self, indices: Sequence[int]) -> None:
        """Makes the states of parameters that have none yet."""
        optimizer = self._get()
        flat = list(itertools.chain(*self.params))
        for index in indices:
            if self.steps[index] is None:
                self._take(optimizer, index, flat[index])

    def constants(self, indices: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the groups of these parameters, and which states they have."""
        return (
            tuple(self._groups[i] for i in indices),
            tuple(self._present[i] for i in indices),
        )

    def entries(self) -> tuple[tuple[int, int], ...]:
        """Returns the places of `tensor_hyper` in `hyper`."""
        return tuple((row, column) for row, column, _ in tensor_entries(self._get()))

    def note_zeroed(self) -> None:
        """Says that zero_grad has been traced."""
        context = TracingContext.try_get()
        self._zeroed_in = None if context is None else weakref.ref(context)

    def check_not_zeroed(self) -> None:
        """Raises RuntimeError if zero_grad has been traced before, into the same graph.

        Dynamo takes gradients that were None before a traced backward for None after it.
        """
        if self._zeroed_in is not None and self._zeroed_in() is TracingContext.try_get():
            raise RuntimeError(
                "a compiled function calls zero_grad before backward and step, which then would "
                "update nothing: expected zero_grad after step, or set_to_none=False"
            )

    # ---------------------------------------------------------------------------------- eagerly

    def _get(self) -> FusedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _has_params(self, optimizer: FusedOptimizer) -> bool:
        groups = optimizer.param_groups
        if len(groups) != len(self.params):
            return False
        same = _extension.load().same_objects
        return all(same(g["params"], seen) for g, seen in zip(groups, self.params, strict=True))

    def _structure(self, optimizer: FusedOptimizer) -> str:
        groups = optimizer.param_groups
        names = [optimizer._state_names(group) for group in groups]
        sizes = [len(group["params"]) for group in groups]
        return repr((optimizer.precision, names, self.entries(), sizes))

    def _build(self) -> None:
        optimizer = self._get()
        optimizer._adopt()
        self.groups = optimizer.param_groups
        self.lists = [group["params"] for group in optimizer.param_groups]
        self.params = [list(params) for params in self.lists]
        flat = list(itertools.chain(*self.params))
        self._groups = [i for i, params in enumerate(self.params) for _ in params]
        self.steps = [None] * len(flat)
        self.states = [[] for _ in flat]
        self.masters = [[] for _ in flat]
        self.scalars = [[] for _ in flat]
        self._present = [0] * len(flat)
        self.why_not = _why_not(optimizer, flat)
        if not self.why_not:
            for index, param in enumerate(flat):
                # Else Dynamo would take another one of the same shape for it.
                torch._dynamo.mark_static_address(param, guard=True)
                if optimizer.state.get(param):
                    self._take(optimizer, index, param)
            live = optimizer._live_hyper()
            live.refresh()
            live.is_in_graph = True
            self.hyper = live.tensor(flat[0].device if flat else torch.device("cpu"))
            self.tensor_hyper = [tensor for _, _, tensor in tensor_entries(optimizer)]
        self.made_for = self._structure(optimizer)
        self.is_current = True

    def _take(self, optimizer: FusedOptimizer, index: int, param: Tensor) -> None:
        group = optimizer.param_groups[self._groups[index]]
        state = optimizer._complete(param, group)
        names = optimizer._state_names(group)
        self.steps[index] = state["step"]
        self.states[index] = [state[name] for name in names if name is not None]
        self._present[index] = sum(1 << k for k, name in enumerate(names) if name is not None)
        master = optimizer.precision.master_of(param.dtype)
        name = {"fp32": "master_param", "remainder16": "remainder"}.get(master or "")
        self.masters[index] = [state[name]] if name else []
        self.scalars[index] = [state["exp_avg_sq"]] if optimizer._has_scalar else []


def _why_not(optimizer: FusedOptimizer, params: list[Tensor]) -> str:
    """Returns why the step of an optimizer cannot be traced; "" if it can."""
    if not hasattr(torch.ops.gpumode, f"{optimizer._rule}_"):
        return f"{type(optimizer).__name__} has more than one op"
    if any(isinstance(param, DTensor) for param in params):
        return "a parameter is a DTensor"
    if len({param.device for param in params}) > 1:
        return "parameters are on more than one device"
    return ""


# What runs while a step is traced, on the real tensors; Dynamo takes what it returns as constant.


@torch.compiler.assume_constant_result
def _prepare(token: str) -> str:
    _by_token[token].prepare()
    return ""


@torch.compiler.assume_constant_result
def _complete(token: str, indices: tuple[int, ...]) -> str:
    _by_token[token].complete(indices)
    return ""


@torch.compiler.assume_constant_result
def _constants(token: str, indices: tuple[int, ...]) -> Any:
    return _by_token[token].constants(indices)


@torch.compiler.assume_constant_result
def _note_zeroed(token: str) -> str:
    _by_token[token].note_zeroed()
    return ""


@torch.compiler.assume_constant_result
def _check_not_zeroed(token: str) -> str:
    _by_token[token].check_not_zeroed()
    return ""


@torch.compiler.assume_constant_result
def _entries(token: str) -> Any:
    return _by_token[token].entries()


@torch.compiler.disable(
    reason="an optimizer step with a scaler, of FusedMuon, or with parameters that are DTensors or "
    "on several devices is not traced"
)
def _eagerly(
    optimizer: FusedOptimizer,
    closure: Callable[[], float] | None,
    max_norm: float | None,
    scaler: Any,
) -> float | None:
    return optimizer._step(closure, max_norm, scaler)


def step(
    optimizer: FusedOptimizer,
    closure: Callable[[], float] | None,
    max_norm: float | None,
    scaler: Any,
) -> float | None:
    """FusedOptimizer.step, while it is traced."""
    inputs = optimizer._traced
    _prepare(inputs.token)
    if scaler is not None or inputs.why_not:
        return _eagerly(optimizer, closure, max_norm, scaler)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    # Comparisons, so that the graph is guarded by what is compared.
    is_ready = inputs.is_current and len(inputs.groups) == len(inputs.lists)
    if not is_ready or not inputs.made_for:
        raise AssertionError("the step of an optimizer was not prepared")
    params: list[Tensor] = []
    indices = []
    index = 0
    for group_params in inputs.lists:
        for param in group_params:
            if param.grad is not None:
                params.append(param)
                indices.append(index)
            index += 1
    if not params:
        _check_not_zeroed(inputs.token)
    with torch.no_grad():
        _update(optimizer, inputs, params, tuple(indices), max_norm)
    return loss


def _update(
    optimizer: FusedOptimizer,
    inputs: Traced,
    params: list[Tensor],
    indices: tuple[int, ...],
    max_norm: float | None,
) -> None:
    """Updates these parameters, which have a gradient."""
    scale = getattr(optimizer, "grad_scale", None)
    grads = [param.grad for param in params]
    total = None
    if max_norm is not None:
        sum_of = torch.ops.gpumode.grad_sum
        total = sum_of(grads, scale) if params else torch.zeros((), dtype=torch.float64)
        inputs.grad_sum = total
    if not params:
        return
    _complete(inputs.token, indices)
    hyper = _hyper(inputs)
    for begin in range(0, len(params), MAX_PARAMS):
        part = indices[begin : begin + MAX_PARAMS]
        groups, present = _constants(inputs.token, part)
        precision = optimizer.precision
        op: Callable[..., None] = getattr(torch.ops.gpumode, f"{optimizer._rule}_")
        op(
            params[begin : begin + MAX_PARAMS],
            grads[begin : begin + MAX_PARAMS],
            [state for i in part for state in inputs.states[i]],
            [master for i in part for master in inputs.masters[i]],
            [inputs.steps[i] for i in part],
            [scalar for i in part for scalar in inputs.scalars[i]],
            hyper,
            groups,
            numbers=part,
            present=present,
            master=precision.master,
            stochastic=precision.stochastic_rounding,
            seed=precision.seed if precision.seed < 2**63 else precision.seed - 2**64,
            grad_scale=scale,
            found_inf=getattr(optimizer, "found_inf", None),
            grad_sum=total,
            max_norm=max_norm,
        )


def _hyper(inputs: Traced) -> Tensor:
    """Returns the hyper-parameters, those that are given as tensors as they are at that time."""
    hyper = inputs.hyper
    assert hyper is not None
    if not inputs.tensor_hyper:
        return hyper
    hyper = hyper.clone()
    places = _entries(inputs.token)
    for (row, column), value in zip(places, inputs.tensor_hyper, strict=True):
        hyper[row, column] = value.detach().reshape(())
    return hyper


def zero_grad(optimizer: FusedOptimizer, set_to_none: bool) -> None:
    """FusedOptimizer.zero_grad, while it is traced."""
    inputs = optimizer._traced
    _prepare(inputs.token)
    assert inputs.is_current
    if set_to_none:
        _note_zeroed(inputs.token)
    for group_params in inputs.lists:
        for param in group_params:
            if param.grad is None:
                continue
            if set_to_none:
                param.grad = None
            else:
                with torch.no_grad():
                    param.grad.zero_()
