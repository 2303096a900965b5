"""What all fused optimizers share: state, checkpoints, and the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, Unpack, overload

import torch
from torch import Tensor

from torch_gpumode.optim import _blocks, _precision, _traced
from torch_gpumode.optim._dtensor import local, with_part
from torch_gpumode.optim._groups import LiveHyper, adopted
from torch_gpumode.optim._precision import DTYPES, Precision, PrecisionOptions
from torch_gpumode.optim._scaling import Scaling
from torch_gpumode.optim._state import ParamState, States, Watch, one_number
from torch_gpumode.optim._table import ParamTable, ParamTables

if TYPE_CHECKING:
    from torch_gpumode.optim.attach import Attached

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


# Of all rules, the states that have their parameter's shape; others are the user's own.
_STATES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg"}
)


class _AsSaved:
    """Carries a tensor past torch's load_state_dict, which casts it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class FusedOptimizer(torch.optim.Optimizer):
    """Updates all tensors of all param groups in one pass over memory.

    A subclass says what its rule in csrc/optim needs: which states a parameter has, and the
    hyper-parameters of a group. All of them take, besides the arguments of their torch.optim
    namesake (of which `foreach` and `fused` choose among torch's implementations, and nothing
    here):

    Args:
        master: where the exact value of a parameter in half precision is kept. "fp32": in a float32
            copy, `state["master_param"]`, which follows what others write into the parameter;
            "remainder16": in 16 more bits for each element of a bfloat16 parameter,
            `state["remainder"]`, which together with the parameter are the same float32 in half
            the memory, and stay when others write the parameter, half a bit of bfloat16 off; None:
            nowhere. Other parameters need none. Loading a state of another kind converts it.
        stochastic_rounding: what is stored as bfloat16 and has no master is rounded up or down by
            chance, so that the average is right. The same `seed`, step and order of parameters give
            the same bits.
        state_dtype: of new states: torch.float32, torch.bfloat16, or torch.uint8: 8-bit floats with
            a scale for each block of 128 elements, rounded stochastically, 1.008 bytes an element;
            None: float32. Those of float64 parameters are float64. With torch.uint8, states are
            float32 where a parameter has fewer than 4,096 elements or is not contiguous, where a
            difference or a maximum is taken of them (RMSprop's `centered`, `amsgrad`), and in
            checkpoints, which so hold them exactly. In a block, what is a 100,000th of the largest
            is no longer told from less, and a NaN, or a gradient beyond 1e19, spoils all: `scaler`
            leaves out steps that have one.
            Loaded states keep the dtype that they have otherwise.
        seed: of stochastic rounding.

    Parameters are float32, bfloat16, float16 or float64, of any layout; gradients are any of these,
    and need not be of the parameter's dtype or layout. What is not float64 is computed in float32.
    Hyper-parameters may be changed at any time. `step` reads p.grad, and does not change it.
    torch.compile can trace `step` and `zero_grad`; README.md says under which conditions. From then
    on param groups refuse a hyper-parameter that is wrong when it is set.

    Raises (`step`, and nothing was changed):
        RuntimeError: a gradient is sparse, complex, or of another shape or device; a state is of
            another shape or device; a parameter or a state shares memory with itself.
        ValueError: a hyper-parameter is not finite.
    """

    _rule: ClassVar[str]
    # Of a group: what `_hyper` and the table of parameters are made from.
    _keys: ClassVar[tuple[str, ...]]
    _has_scalar: ClassVar[bool] = False
    # Those states that are never negative: kSquares of the rule.
    _squares: ClassVar[frozenset[str]] = frozenset()
    # Whether a checkpoint of our namesake has it; random bits depend on it, too.
    _saves_step: ClassVar[bool] = True
    # GradScaler then leaves unscaling, and what to do about infinities, to `step`.
    _step_supports_amp_scaling = True

    # What is derived from the state and the groups; None: it must be made anew.
    _tables: ParamTables | None = None
    _attached: list[Attached]
    # What a compiled step reads, and, once there is one, where it reads hyper-parameters.
    _traced: _traced.Traced
    _live: LiveHyper | None = None
    _recorded: list[ParamTables]  # by CUDA graphs

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        **precision: Unpack[PrecisionOptions],
    ) -> None:
        if defaults.get("differentiable"):
            raise RuntimeError("`fused` does not support `differentiable`")
        if defaults.get("fused") and defaults.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        for name in precision.keys() - {field.name for field in fields(Precision)}:
            raise TypeError(
                f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}"
            )
        # Not in the groups, so that a checkpoint has torch's own keys, and no others.
        self.precision = Precision(**precision)
        self._check_group(defaults)
        if isinstance(params, Iterable) and not isinstance(params, Tensor | dict):
            params = list(params)  # type: ignore[assignment]
        groups = [g for g in params if isinstance(g, dict)] if isinstance(params, list) else []
        before = [dict(g) for g in groups]
        self._traced = _traced.Traced(self)
        try:
            super().__init__(params, defaults)
        except BaseException:
            for group, was in zip(groups, before, strict=True):
                group.clear()
                group.update(was)
            raise
        self._adopt_state()
        self._attached = []
        self._recorded = []

    # ------------------------------------------------------------------------- for subclasses

    def _state_names(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        """Returns the keys of the rule's states, in its order; None for one the group has not."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the rule's hyper-parameters by name."""
        raise NotImplementedError

    def _initial(self, name: str, group: dict[str, Any]) -> float:
        """Returns what a new state is filled with."""
        return 0.0

    def _needs_exact(self, group: dict[str, Any], name: str) -> bool:
        """Returns whether a state must not be packed."""
        return False

    def _make_table(self, device: torch.device, params: Collection[Tensor]) -> ParamTable:
        """Returns a table of these parameters, all of which are on `device`."""
        return ParamTable(self, device, params)

    def _check_hyper(self, group: dict[str, Any]) -> None:
        """Raises ValueError for hyper-parameters that make no sense."""

    # ----------------------------------------------------------------------------- groups, state

    def _check_group(self, group: dict[str, Any]) -> None:
        for key in self._keys:
            values = group[key] if isinstance(group[key], tuple | list) else (group[key],)
            for value in values:
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(f"Tensor {key} must be 1-element")
                if isinstance(value, float | Tensor) and not math.isfinite(value):
                    raise ValueError(f"Invalid {key}: {value}: expected a finite number")
        self._check_hyper(group)

    def _check_params(self, group: dict[str, Any]) -> None:
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError("a parameter appears more than once in a parameter group")
        for param in group["params"]:
            if param.dtype not in DTYPES:
                raise RuntimeError(
                    f"{type(self).__name__} requires all the params to be floating point Tensors "
                    f"of float32, bfloat16, float16 or float64, but one is of {param.dtype}"
                )
            if param.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} requires dense params, but one is {param.layout}"
                )
            if param.dtype == torch.float16 and self.precision.master == "remainder16":
                raise ValueError(
                    'master: "remainder16" is for parameters of bfloat16, and one is of float16: '
                    'expected "fp32"'
                )
            if param.dtype == torch.float16 and self.precision.stochastic_rounding:
                raise ValueError(
                    "stochastic_rounding: is for parameters of bfloat16, and one is of float16"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's; a call that raises leaves the caller's dict as it was."""
        before = dict(param_group) if isinstance(param_group, dict) else {}
        for option in fields(Precision):
            if option.name in before:
                raise ValueError(
                    f"{option.name}: is for all param groups: give it to {type(self).__name__}"
                )
        num_groups = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            self._check_group(self.param_groups[-1])
            self._check_params(self.param_groups[-1])
        except BaseException:
            del self.param_groups[num_groups:]
            if before:
                param_group.clear()
                param_group.update(before)
            raise
        self._tables = None
        self._renew()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_traced", _traced.Traced(self))
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._adopt_state()
        self.__dict__.setdefault("_attached", [])  # of a copy: to nothing
        self.__dict__.setdefault("_recorded", [])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("state", "param_groups"):
            self._traced.invalidate()
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        plain = self.state.plain()  # type: ignore[attr-defined]
        return {**super().__getstate__(), "state": plain, "precision": self.precision}

    def _adopt_state(self) -> None:
        """Watches the state, and forgets what was derived from it."""
        self._watch = Watch(self._traced)
        self.state = States(self._watch, self.state)  # type: ignore[assignment]
        self._tables = None

    def _adopt(self) -> None:
        """Watches the state and the groups, where somebody has replaced them."""
        if type(self.state) is not States:
            self._adopt_state()
        groups = adopted(self, self.param_groups)
        if any(own is not group for own, group in zip(groups, self.param_groups, strict=True)):
            self.param_groups = groups
            if self._live is not None:
                self._live.forget()

    def _renew(self) -> None:
        """Tells a compiled step what there is now."""
        self._adopt()
        if self._live is not None:
            self._live.forget()
            if self._live.is_in_graph:
                self._live.refresh()
        self._traced.renew()

    def _live_hyper(self) -> LiveHyper:
        """Returns the hyper-parameters as kernels on a device read them."""
        if self._live is None:
            self._live = LiveHyper(self)
        return self._live

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer.state_dict; what our namesake in torch.optim can load."""

        def plain(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
            for key, kept in saved["state"].items():
                saved["state"][key] = dict(kept) if isinstance(kept, dict) else kept
            params = [param for group in self.param_groups for param in group["params"]]
            for number, param in enumerate(params):
                kept = saved["state"].get(number)
                if isinstance(kept, dict) and any(map(_blocks.are_blocks, kept.values())):
                    kept["step"] = deepcopy(kept["step"])  # as what is unpacked
                for name in kept if isinstance(kept, dict) else ():
                    kept[name] = self._saved(param, name, kept[name])

        hook = self.register_state_dict_post_hook(plain, prepend=True)  # before the user's
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of its torch.optim namesake.

        States go to their parameter's device and keep their dtype.
        """

        def hide(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            def hidden(value: Any) -> Any:
                return _AsSaved(value) if isinstance(value, Tensor) else value

            states = {
                key: {name: hidden(v) for name, v in kept.items()}
                if isinstance(kept, dict)
                else kept
                for key, kept in loaded["state"].items()
            }
            return {**loaded, "state": states}

        def show(_: torch.optim.Optimizer) -> None:
            for param, kept in self.state.items():
                for name, value in kept.items() if isinstance(kept, dict) else ():
                    if isinstance(value, _AsSaved):
                        kept[name] = value.tensor.to(device=param.device)

        # After the user's hooks, and before them.
        hooks = [
            self.register_load_state_dict_pre_hook(hide),
            self.register_load_state_dict_post_hook(show, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        self._tables = None
        self._renew()

    @torch.no_grad()
    def _complete(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Adds to the state of a parameter what it lacks; returns it, with its step."""
        names = [name for name in self._state_names(group) if name is not None]
        state = self.state.get(param, ParamState(self._watch))
        has_any = any(isinstance(state.get(name), Tensor) for name in names)
        # Who has lost its averages starts over.
        step = 0.0 if names and not has_any else state.get("step", float(has_any))
        step = one_number(step, param.device)
        if self._saves_step or self.precision.uses_chance:
            state.add("step", step)
        else:  # one tensor for all that update it, eagerly or compiled
            if state.unsaved_step is None or not has_any:
                state.unsaved_step = step
            step = state.unsaved_step
        dtype = self.precision.state_dtype_of(param.dtype)
        for name in names:
            if not isinstance(state.get(name), Tensor):
                state.add(name, self._new_state(param, group, name, dtype))
                continue
            kept = self._kept(param, group, name, state[name])
            if kept is not state[name]:
                state[name] = kept  # others that use the state must hear of that
        if self._has_scalar:
            state.add("exp_avg_sq", one_number(state.get("exp_avg_sq", 0.0), param.device))
        self._complete_master(param, state)
        if state:
            self.state.add(param, state)  # type: ignore[attr-defined]
        return {**state, "step": step}

    def _complete_master(self, param: Tensor, state: ParamState) -> None:
        """Adds the exact value of a parameter, from that of another kind if there is one."""
        master = self.precision.master_of(param.dtype)
        whole, remainder = state.get("master_param"), state.get("remainder")
        part = local(param.detach())
        if master == "fp32" and "master_param" not in state:
            exact = part.float()
            if part.dtype == torch.bfloat16 and _is(remainder, torch.int16):
                exact = _precision.master_of(part, local(remainder))
            state.add("master_param", with_part(param, exact))
        if master == "remainder16" and "remainder" not in state:
            rest = torch.zeros_like(part, dtype=torch.int16)
            if _is(whole, torch.float32):
                rest = _precision.remainder_of(part, local(whole))
            state.add("remainder", with_part(param, rest))
        if part.dtype not in (torch.bfloat16, torch.float16):
            return
        if master != "fp32" and _is(whole, torch.float32):
            state.discard("master_param")
        if master != "remainder16" and _is(remainder, torch.int16):
            state.discard("remainder")

    # -------------------------------------------------------------------------- states of 8 bits

    def _packs(self, param: Tensor, group: dict[str, Any], name: str) -> bool:
        if not self.precision.packs or self._needs_exact(group, name):
            return False
        return _blocks.can_have_blocks(local(param))

    def _new_state(
        self, param: Tensor, group: dict[str, Any], name: str, dtype: torch.dtype
    ) -> Tensor:
        value = self._initial(name, group)
        if value == 0 and self._packs(param, group, name):
            return _blocks.zeros(local(param))
        new = torch.full_like(param, value, dtype=dtype, requires_grad=False)
        return self._kept(param, group, name, new)

    def _kept(self, param: Tensor, group: dict[str, Any], name: str, state: Tensor) -> Tensor:
        """Returns a state as it is to be kept: in blocks, if that is asked for and can be."""
        part = local(param)
        packs = self._packs(param, group, name)
        if _blocks.are_blocks_of(state, part):
            return state if packs else self._saved(param, name, state)
        values = local(state)
        is_plain = values.layout == torch.strided and values.shape == part.shape
        is_float = values.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not packs or not is_plain or not is_float or values.device != part.device:
            return state
        return _blocks.pack(values, name in self._squares)

    def _saved(self, param: Tensor, name: str, state: Any) -> Any:
        """Returns a state as checkpoints have it."""
        part = local(param)
        if not self.precision.packs or name not in _STATES or not _blocks.are_blocks(state):
            return state
        if not _blocks.are_blocks_of(state, part):
            raise RuntimeError(
                f"{name} of a parameter of shape {tuple(part.shape)} is in blocks of 8 bits for "
                f"another number of elements"
            )
        return with_part(param, _blocks.unpack(state, part, name in self._squares))

    # ------------------------------------------------------------------------------------ step

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients in the last step with max_norm or scaler.

        One number, float32, on the device of the first parameter: of the gradients divided by the
        scaler's scale, and before clipping.
        """
        if self._traced.grad_sum is None:
            raise AttributeError("grad_norm: no step was made with max_norm or scaler")
        return self._traced.grad_sum.sqrt().float()

    @overload
    def step(
        self, closure: None = None, *, max_norm: float | None = None, scaler: Any = None
    ) -> None: ...
    @overload
    def step(
        self, closure: Callable[[], float], *, max_norm: float | None = None, scaler: Any = None
    ) -> float: ...
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        max_norm: float | None = None,
        scaler: Any = None,
    ) -> float | None:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss, and the gradients, first.
            max_norm: what the norm of all gradients together is clipped to, as
                torch.nn.utils.clip_grad_norm_ does it, but p.grad stays as it is. The norm before
                clipping is in `self.grad_norm` then, a tensor of one number.
            scaler: a torch.amp.GradScaler, instead of its `unscale_` and `step`: gradients are
                divided by its scale here, and if one is not finite, nothing is changed. Call
                scaler.update() after it.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: with `scaler`, `closure` was given, or the step was made already; with
                `max_norm` or `scaler`, the optimizer is attached (`attach`).
            ValueError: `max_norm` is negative or NaN.
            What the class's docstring says.
        """
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"Invalid max_norm: {max_norm}: expected a number of at least 0")
        if self._attached and (max_norm is not None or scaler is not None):
            name = "scaler" if max_norm is None else "max_norm"
            raise RuntimeError(
                f"{name}: the optimizer is attached to a model, and has made its steps in backward "
                f"already, without: expected neither, or detach()"
            )
        if torch.compiler.is_compiling():
            return _traced.step(self, closure, max_norm, scaler)
        return self._step(closure, max_norm, scaler)

    # Schedulers would wrap it, in a file that Dynamo does not trace, to know that it was called.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _step(
        self, closure: Callable[[], float] | None, max_norm: float | None, scaler: Any
    ) -> float | None:
        self._opt_called = True
        scaling = Scaling(self, scaler, max_norm)
        loss = None
        if closure is not None:
            if scaling.is_by_scaler:
                raise RuntimeError(
                    "Closure use is not currently supported if GradScaler is enabled."
                )
            with torch.enable_grad():
                loss = closure()
        tables = self._tables = self._current_tables(self._tables)
        if scaling.needs_grad_sum:
            self._traced.grad_sum, is_bad = tables.grad_sum(scaling)
            scaling.learn(self._traced.grad_sum, is_bad)
        tables.step(scaling)
        scaling.finish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's, and can be traced."""
        if torch.compiler.is_compiling():
            _traced.zero_grad(self, set_to_none)
        else:
            super().zero_grad(set_to_none)

    def _current_tables(
        self, tables: ParamTables | None, only: Collection[Tensor] | None = None
    ) -> ParamTables:
        """Returns `tables`, or new ones if they are out of date; hyper-parameters are of now."""
        self._adopt()
        if tables is None or not tables.is_current():
            if tables is not None and tables.was_recorded():
                self._recorded.append(tables)
            tables = ParamTables(self, only)
        tables.update_hyper()
        return tables


def _is(state: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(state, Tensor) and state.dtype == dtype
