"""Mistakes that a step finds: an error that says what, and nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _optim import BF16, F64, FUSED, bits, everything, parameter
from torch.nn import Parameter


def sparse_grad(optimizer: Any, param: Parameter) -> None:
    param.grad = torch.randn(param.shape).to(param.dtype).to_sparse()


def grad_shape(optimizer: Any, param: Parameter) -> None:
    param.grad.data = torch.randn(5).to(param.dtype)


def complex_grad(optimizer: Any, param: Parameter) -> None:
    param.grad = torch.randn(param.shape, dtype=torch.complex64)


def integer_grad(optimizer: Any, param: Parameter) -> None:
    param.grad = torch.ones(param.shape, dtype=torch.int64)


def expanded_param(optimizer: Any, param: Parameter) -> None:
    param.data = torch.randn(1, 4).to(param.dtype).expand(3, 4)


def meta_param(optimizer: Any, param: Parameter) -> None:
    optimizer.param_groups[-1]["params"][-1] = other = Parameter(torch.empty(3, 4, device="meta"))
    other.grad = torch.empty(3, 4, device="meta")
    optimizer.state.pop(param, None)


def meta_state(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.empty(3, 4, device="meta")


def state_shape(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.randn(4, 3)


def state_shape_that_broadcasts(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg_sq"] = torch.rand(4)


def expanded_state(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.randn(1, 4).expand(3, 4)


def integer_state(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.ones(3, 4, dtype=torch.int32)


def small_state(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.ones(3, 4, dtype=torch.int8)


def sparse_state(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.randn(3, 4).to_sparse()


def master_dtype(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["master_param"] = param.detach().clone()


def master_shape(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["master_param"] = torch.randn(12)


def remainder_dtype(optimizer: Any, param: Parameter) -> None:
    optimizer.state[param]["remainder"] = torch.zeros(3, 4)


def negative_lr(optimizer: Any, param: Parameter) -> None:
    optimizer.param_groups[-1]["lr"] = -1e-3


def tensor_lr(optimizer: Any, param: Parameter) -> None:
    optimizer.param_groups[-1]["lr"] = torch.tensor(float("inf"))


def short_betas(optimizer: Any, param: Parameter) -> None:
    optimizer.param_groups[-1]["betas"] = (0.9,)


IN_STEP: list[tuple[Callable[[Any, Parameter], None], type[Exception], str]] = [
    (sparse_grad, RuntimeError, "sparse gradients"),
    (grad_shape, RuntimeError, r"gradient of a parameter of shape \[3, 4\] has the shape \[5\]"),
    (complex_grad, RuntimeError, "gradient .*ComplexFloat"),
    (integer_grad, RuntimeError, "gradient .*Long"),
    (expanded_param, RuntimeError, "shares memory with itself"),
    (meta_param, RuntimeError, "meta"),
    (meta_state, RuntimeError, "state .*is on meta"),
    (state_shape, RuntimeError, r"state .*\[4, 3\]"),
    (state_shape_that_broadcasts, RuntimeError, r"state .*\[4\]"),
    (expanded_state, RuntimeError, "shares memory with itself"),
    (integer_state, RuntimeError, "state"),
    (small_state, RuntimeError, "state"),
    (sparse_state, RuntimeError, "state"),
    (master_dtype, RuntimeError, "master"),
    (master_shape, RuntimeError, r"master .*\[12\]"),
    (remainder_dtype, RuntimeError, "master|remainder"),
    (negative_lr, ValueError, "Invalid learning rate"),
    (tensor_lr, ValueError, "Invalid"),
    (short_betas, (ValueError, IndexError), "beta|unpack|index"),
]
OF_STATE = ("state", "master_", "remainder_")


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    ("make", "error", "text"), IN_STEP, ids=[make.__name__ for make, _, _ in IN_STEP]
)
def test_step(make: Callable, error: type[Exception], text: str, num_before: int):
    """Nothing is changed, not even of the parameters that come before; and once the mistake is
    undone, the optimizer goes on as one that has not seen it."""
    if num_before == 0 and any(part in make.__name__ for part in OF_STATE):
        return
    torch.manual_seed(1)
    master = "remainder16" if make is remainder_dtype else "fp32"
    values = [torch.randn(7), torch.randn(2, 3), torch.randn(3, 4).to(BF16)]
    runs = []
    for _ in range(2):
        params = [parameter(value.clone()) for value in values]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        runs.append((params, FUSED["AdamW"](groups, lr=0.1, master=master)))

    def make_grads() -> None:
        for param, other in zip(runs[0][0], runs[1][0], strict=True):
            param.grad = torch.randn(param.shape).to(param.dtype)
            other.grad = param.grad.clone()

    for _ in range(num_before):
        make_grads()
        for _, optimizer in runs:
            optimizer.step()
    make_grads()
    params, optimizer = runs[0]
    data, grad = params[-1].data, params[-1].grad.data
    group, state = optimizer.param_groups[-1], optimizer.state
    kept = dict(group), list(group["params"]), copy.copy(state.get(params[-1]))
    make(optimizer, params[-1])
    before = everything(optimizer, params)
    versions = [param._version for param in params]
    for _ in range(2):
        with pytest.raises(error, match=text):
            optimizer.step()
        assert [param._version for param in params] == versions
        assert everything(optimizer, params) == before
    params[-1].data = data
    params[-1].grad = grad
    group.clear()
    group.update(kept[0])
    group["params"][:] = kept[1]
    if kept[2] is not None:
        state[params[-1]] = kept[2]
    for _, each in runs:
        each.step()
    result, expected = [[p, o.state_dict()["state"]] for p, o in runs]
    assert bits(result) == bits(expected)


def test_a_closure_that_raises():
    param = parameter(torch.randn(4, dtype=F64))
    optimizer = FUSED["SGD"]([param], lr=0.1, momentum=0.9)
    param.grad = torch.randn(4, dtype=F64)
    optimizer.step()
    before = everything(optimizer)

    def closure() -> float:
        raise FloatingPointError("mine")

    with pytest.raises(FloatingPointError, match="mine"):
        optimizer.step(closure)
    assert everything(optimizer) == before
