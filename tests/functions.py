"""Pointwise functions once more, by the standard library and by torch: what the project's own are held to."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SLOW: dict[str, Callable[[float, float], float]] = {
    "hardswish": lambda x, _: x * min(max(x + 3, 0), 6) / 6,
    "hardsigmoid": lambda x, _: min(max(x + 3, 0), 6) / 6,
    "silu": lambda x, _: x / (1 + math.exp(-x)),
    "sigmoid": lambda x, _: 1 / (1 + math.exp(-x)),
    "leaky_relu": lambda x, slope: x if x > 0 else slope * x,
    "tanh": lambda x, _: math.tanh(x),
    "gelu": lambda x, _: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x, _: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "elu": lambda x, alpha: x if x > 0 else alpha * math.expm1(x),
}
"""`(x, parameter) -> value`, one number at a time."""

TORCH: dict[str, Callable[[Tensor, float], Tensor]] = {
    "hardswish": lambda x, _: functional.hardswish(x),
    "hardsigmoid": lambda x, _: functional.hardsigmoid(x),
    "silu": lambda x, _: functional.silu(x),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "leaky_relu": lambda x, slope: functional.leaky_relu(x, slope),
    "tanh": lambda x, _: torch.tanh(x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "elu": lambda x, alpha: functional.elu(x, alpha),
}

PARAMETERS = {"leaky_relu": 0.125, "elu": 0.75}
"""Of functions that have one."""
