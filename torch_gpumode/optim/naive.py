"""What the fused optimizers compute, one tensor after the other: their specification.

Each function makes one step of one tensor in place, in the dtype of its tensors, and has no other
state than what it is given. `step` is 1 in the first. `options` are a param group's. The fused ones
round once, what they store; but LAMB's step takes the direction of the averages as they were
stored, and its norm from before that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def adam(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: exp_avg, exp_avg_sq, and max_exp_avg_sq if amsgrad; all 0 at first."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    grad = -grad if options["maximize"] else grad
    if options["decoupled_weight_decay"]:
        param *= 1 - lr * options["weight_decay"]
    else:
        grad = grad + options["weight_decay"] * param
    state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
    square = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
    if options["amsgrad"]:
        square = state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    mean = state["exp_avg"] / (1 - beta1**step)
    param -= lr * mean / ((square / (1 - beta2**step)).sqrt() + options["eps"])


def sgd(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: momentum_buffer if there is momentum."""
    momentum = options["momentum"]
    grad = -grad if options["maximize"] else grad
    grad = grad + options["weight_decay"] * param
    if momentum:
        if step == 1:
            state["momentum_buffer"] = grad
        else:
            kept = momentum * state["momentum_buffer"]
            state["momentum_buffer"] = kept + (1 - options["dampening"]) * grad
        buffer = state["momentum_buffer"]
        grad = grad + momentum * buffer if options["nesterov"] else buffer
    param -= options["lr"] * grad


def adagrad(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: sum, at first initial_accumulator_value."""
    grad = -grad if options["maximize"] else grad
    grad = grad + options["weight_decay"] * param
    state["sum"] = state["sum"] + grad**2
    lr = options["lr"] / (1 + (step - 1) * options["lr_decay"])
    param -= lr * grad / (state["sum"].sqrt() + options["eps"])


def rmsprop(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: square_avg, momentum_buffer if momentum, grad_avg if centered; all 0 at first."""
    alpha = options["alpha"]
    grad = -grad if options["maximize"] else grad
    grad = grad + options["weight_decay"] * param
    square = state["square_avg"] = alpha * state["square_avg"] + (1 - alpha) * grad**2
    if options["centered"]:
        state["grad_avg"] = alpha * state["grad_avg"] + (1 - alpha) * grad
        square = (square - state["grad_avg"] ** 2).clamp(min=0)
    move = grad / (square.sqrt() + options["eps"])
    if options["momentum"]:
        move = state["momentum_buffer"] = options["momentum"] * state["momentum_buffer"] + move
    param -= options["lr"] * move


def lion(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: exp_avg, at first 0."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    grad = -grad if options["maximize"] else grad
    direction = (beta1 * state["exp_avg"] + (1 - beta1) * grad).sign()
    param *= 1 - lr * options["weight_decay"]
    param -= lr * direction
    state["exp_avg"] = beta2 * state["exp_avg"] + (1 - beta2) * grad


def lamb(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: exp_avg, exp_avg_sq; both 0 at first."""
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    grad = -grad if options["maximize"] else grad
    if not options["adam_w_mode"]:
        grad = grad + decay * param
    share = 1 - beta1 if options["grad_averaging"] else 1
    mean = state["exp_avg"] = beta1 * state["exp_avg"] + share * grad
    square = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
    if options["bias_correction"]:
        mean, square = mean / (1 - beta1**step), square / (1 - beta2**step)
    direction = mean / (square.sqrt() + options["eps"])
    if options["adam_w_mode"]:
        direction = direction + decay * param
    norms = param.norm(), direction.norm()
    if (decay or options["use_nvlamb"]) and min(norms) > 0:
        lr = lr * norms[0] / norms[1]
    param -= lr * direction


def novograd(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: exp_avg, and exp_avg_sq, one number; both 0 at first."""
    lr, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    grad = -grad if options["maximize"] else grad
    norm = grad.square().sum()
    if step == 1 and not options["init_zero"]:
        state["exp_avg_sq"] = norm
    else:
        state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * norm
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    if not options["bias_correction"]:
        correction1 = correction2 = 1
    scale = (state["exp_avg_sq"] / correction2).sqrt() + options["eps"]
    share = 1 - beta1 if options["grad_averaging"] else 1
    if options["reg_inside_moment"]:
        state["exp_avg"] = beta1 * state["exp_avg"] + share * (grad / scale + decay * param)
        param -= lr * state["exp_avg"] / correction1
    else:
        state["exp_avg"] = beta1 * state["exp_avg"] + share * grad
        param -= lr * (state["exp_avg"] / correction1 / scale + decay * param)


def muon(param: Tensor, grad: Tensor, state: State, step: int, **options: Any) -> None:
    """state: momentum_buffer, at first 0. The fused one makes directions orthogonal in bfloat16."""
    lr, momentum = options["lr"], options["momentum"]
    buffer = state["momentum_buffer"] = momentum * state["momentum_buffer"] + (1 - momentum) * grad
    direction = (1 - momentum) * grad + momentum * buffer if options["nesterov"] else buffer
    a, b, c = options["ns_coefficients"]
    x = direction / direction.norm().clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        x = a * x + b * (x @ x.mT) @ x + c * (x @ x.mT) @ (x @ x.mT) @ x
    rows, columns = param.shape
    factor = {
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
        "spectral_unclamped": (rows / columns) ** 0.5,
    }.get(options["adjust_lr_fn"], max(1, rows / columns) ** 0.5)
    param *= 1 - lr * options["weight_decay"]
    param -= lr * factor * x
