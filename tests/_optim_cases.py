"""What optimizers are tested with: every rule, option, dtype and layout."""

from __future__ import annotations

from typing import Any

from _optim import BF16, DTYPES, F16, F32, all_pairs

# What each optimizer is run with.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [
        {},
        {"weight_decay": 0.1, "amsgrad": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.3, "maximize": True},
        {"betas": (0.0, 0.5), "eps": 1e-3, "amsgrad": True, "maximize": True},
    ],
    "AdamW": [{}, {"weight_decay": 0.0}, {"amsgrad": True, "maximize": True, "weight_decay": 0.2}],
    "SGD": [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.2, "maximize": True},
    ],
    "Adagrad": [
        {},
        {"lr_decay": 0.25, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.5, "maximize": True, "eps": 1e-3},
    ],
    "RMSprop": [
        {},
        {"momentum": 0.9},
        {"centered": True, "weight_decay": 0.1},
        {"centered": True, "momentum": 0.5, "maximize": True, "alpha": 0.9, "eps": 1e-4},
    ],
    "Lion": [{}, {"weight_decay": 0.3, "maximize": True}, {"betas": (0.5, 0.8)}],
    "LAMB": [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False},
        {"adam_w_mode": False, "bias_correction": False, "weight_decay": 0.2},
        {"adam_w_mode": False, "use_nvlamb": True, "maximize": True, "eps": 1e-3},
        {"bias_correction": False, "grad_averaging": False, "maximize": True},
    ],
    "NovoGrad": [
        {},
        {"reg_inside_moment": True, "weight_decay": 0.1},
        {"init_zero": True, "grad_averaging": False},
        {"bias_correction": False, "weight_decay": 0.2, "maximize": True},
        {
            "reg_inside_moment": True,
            "grad_averaging": False,
            "init_zero": True,
            "weight_decay": 0.1,
        },
        {"reg_inside_moment": True, "bias_correction": False, "betas": (0.8, 0.5), "eps": 1e-3},
    ],
}
RULES = [(name, options) for name, table in OPTIONS.items() for options in table]

# Each run updates one of each: the parameter's layout and shape, the gradient's layout.
TENSORS = [
    ("contiguous", (0,), "contiguous"),
    ("contiguous", (1,), "contiguous"),
    ("contiguous", (67,), "contiguous"),
    ("contiguous", (1000,), "misaligned"),
    ("slice", (9, 7), "contiguous"),
    ("slice", (5, 13), "expanded"),
    ("slice", (3, 2, 5), "slice"),
    ("transposed", (12, 11), "contiguous"),
    ("transposed", (5, 17), "transposed"),
    ("channels_last", (2, 3, 5, 4), "contiguous"),
    ("channels_last", (2, 5, 3, 3), "channels_last"),
    ("misaligned", (131,), "slice"),
    ("misaligned", (6, 50), "expanded"),
    ("contiguous", (6, 10), "transposed"),
    ("contiguous", (), "contiguous"),
    ("slice", (4, 0), "contiguous"),
]


def is_allowed(choice: dict[str, Any]) -> bool:
    return not (choice.get("param") == F16 and choice.get("master") == "remainder16")


FACTORS = {
    "rule": range(len(RULES)),
    "param": DTYPES,
    "grad": DTYPES,
    "state": (None, F32, BF16),
    "master": (None, "fp32", "remainder16"),
}
ROWS = list(all_pairs(FACTORS, is_allowed))


def name_of(row: dict[str, Any]) -> str:
    name, options = RULES[row["rule"]]
    short = [str(row[key]).removeprefix("torch.") for key in ("param", "grad", "state", "master")]
    return "-".join([name, *(f"{key}={value}" for key, value in options.items()), *short])
