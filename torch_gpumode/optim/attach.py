"""Steps inside backward: gradients are used and freed as they become ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from torch_gpumode.optim._fused import FusedOptimizer
from torch_gpumode.optim._scaling import Scaling
from torch_gpumode.optim._table import ParamTables

DEFAULT_BUCKET_NBYTES = 32 << 20


def attach(
    optimizer: FusedOptimizer, model: nn.Module, *, bucket_nbytes: int = DEFAULT_BUCKET_NBYTES
) -> Attached:
    """Makes backward update the parameters of `model`, so that never all gradients are there.

    handle = torch_gpumode.optim.attach(optimizer, model)
    for batch in data:
        loss_of(model, batch).backward()  # also makes the step, and sets p.grad to None
    handle.detach()

    Parameters are dealt into buckets, in the order in which backward is expected to reach them; a
    bucket is updated, in one launch, when the last of its gradients is ready, and what is left
    when backward ends. What needs all gradients at once cannot be had: clipping by a norm,
    GradScaler, several backwards per step, backward twice through one graph, and parameters that
    reentrant checkpoints share. Schedulers work as ever; hooks of `step` are not called.
    `optimizer.step()` still updates what has a gradient: parameters of others than `model`; with
    `max_norm` or `scaler` it raises RuntimeError.

    Args:
        optimizer: one of this package.
        model: whose parameters are updated, of those that the optimizer has. With FSDP2, call
            fully_shard first.
        bucket_nbytes: how many bytes of parameters are updated at once.

    Returns:
        A handle whose `detach()` ends it; also a context manager that does.

    Raises:
        TypeError: `optimizer` is none of this package.
        ValueError: it has no parameter of `model`, or they are attached already, or `model` is in
            DistributedDataParallel, which averages gradients only after they were used here.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"optimizer: expected one of torch_gpumode.optim, got {torch.typename(optimizer)}"
        )
    if bucket_nbytes <= 0:
        raise ValueError(f"bucket_nbytes: expected a positive number, got {bucket_nbytes}")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("model: is in DistributedDataParallel, which needs all gradients at once")
    owned = {param for group in optimizer.param_groups for param in group["params"]}
    params: list[Tensor] = [p for p in model.parameters() if p in owned and p.requires_grad]
    if not params:
        raise ValueError("model: none of its parameters is updated by the optimizer")
    if any(param in handle.params for handle in optimizer._attached for param in params):
        raise ValueError("model: is attached already")
    return Attached(optimizer, params, bucket_nbytes)


class _Bucket:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.tables: ParamTables | None = None
        self.ready: set[Tensor] = set()


class Attached:
    """That an optimizer is attached to a model; see `attach`."""

    def __init__(self, optimizer: FusedOptimizer, params: list[Tensor], bucket_nbytes: int) -> None:
        self._optimizer = optimizer
        self.params = set(params)
        self._buckets = [_Bucket(part) for part in _parts(params, bucket_nbytes)]
        self._backward = -1  # the number of the one that runs
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook_of(bucket))
            for bucket in self._buckets
            for param in bucket.params
        ]
        optimizer._attached.append(self)

    def detach(self) -> None:
        """Ends it: backward leaves gradients in p.grad again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self in self._optimizer._attached:
            self._optimizer._attached.remove(self)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def _hook_of(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if self._backward != torch._C._current_graph_task_id():
                self._begin()
            bucket.ready.add(param)
            if len(bucket.ready) == len(bucket.params):
                self._step(bucket)

        return hook

    def _begin(self) -> None:
        self._backward = torch._C._current_graph_task_id()
        for bucket in self._buckets:  # of a backward that raised
            bucket.ready.clear()
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        for bucket in self._buckets:
            if bucket.ready:
                self._step(bucket)

    def _step(self, bucket: _Bucket) -> None:
        bucket.ready.clear()
        bucket.tables = self._optimizer._current_tables(bucket.tables, bucket.params)
        bucket.tables.step(Scaling(self._optimizer))
        self._optimizer._opt_called = True  # for schedulers
        for param in bucket.params:
            param.grad = None


def _parts(params: list[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Yields the parameters from last to first, in lists of about `nbytes`."""
    part: list[Tensor] = []
    size = 0
    for param in reversed(params):
        part.append(param)
        size += param.numel() * param.element_size()
        if size >= nbytes:
            yield part
            part, size = [], 0
    if part:
        yield part
