"""The state of an optimizer, as mappings that say when somebody else changes them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_gpumode.optim._traced import Traced


class Watch:
    """How often a mapping was changed; tells what a compiled step reads."""

    def __init__(self, traced: Traced) -> None:
        self.num_changes = 0
        self._traced = traced
        traced.invalidate()

    def changed(self) -> None:
        self.num_changes += 1
        self._traced.invalidate()


class _Watched(dict[Any, Any]):
    """A dict that tells its watch about every change that is made through its methods."""

    def __init__(self, watch: Watch, *args: Any) -> None:
        super().__init__(*args)
        self._watch = watch

    def _changed(self) -> None:
        self._watch.changed()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changed()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._changed()
        super().__delitem__(key)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        self._changed()
        super().clear()

    def pop(self, *args: Any) -> Any:
        self._changed()
        return super().pop(*args)

    def popitem(self) -> tuple[Any, Any]:
        self._changed()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class ParamState(_Watched):
    """What one parameter keeps.

    `unsaved_step` is its step, where checkpoints have none; what others change is a new start.
    """

    unsaved_step: Tensor | None = None

    def _changed(self) -> None:
        super()._changed()
        self.unsaved_step = None

    def add(self, key: str, value: Any) -> None:
        """Sets an item without telling the watch: the optimizer itself does that."""
        dict.__setitem__(self, key, value)

    def discard(self, key: str) -> None:
        """Removes an item without telling the watch."""
        dict.pop(self, key, None)


class States(_Watched):
    """What all parameters keep; makes the state of one that has none yet, as a defaultdict does."""

    def __init__(self, watch: Watch, states: dict[Any, Any]) -> None:
        super().__init__(watch)
        for key, value in states.items():
            self.add(key, self._watched(value))

    def _watched(self, value: Any) -> Any:
        if isinstance(value, ParamState) and value._watch is self._watch:
            return value
        return ParamState(self._watch, value) if isinstance(value, dict) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self._watched(value))

    def __missing__(self, key: Any) -> ParamState:
        state = ParamState(self._watch)
        self.add(key, state)
        return state

    def add(self, key: Any, state: ParamState) -> None:
        """Sets an item without telling the watch."""
        dict.__setitem__(self, key, state)

    def plain(self) -> defaultdict[Any, Any]:
        """Returns a copy made of ordinary dicts."""
        copy: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in self.items():
            copy[key] = dict(value) if isinstance(value, ParamState) else value
        return copy


def one_number(value: Any, device: torch.device) -> Tensor:
    """Returns a state of one number as the table needs it, whatever form it was saved in."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() == 0:
        return value.to(device)
    return torch.full((), float(value), dtype=torch.float32, device=device)
