"""Pointwise functions as torch operators that XNNPACK takes in float32."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from fedmpq.model.ops import Lookup

_ROOT_TWO_OVER_PI = math.sqrt(2 / math.pi)


def function_of(op: Lookup, source: torch.Tensor) -> torch.Tensor:
    """The function's value."""
    if op.function == "hardswish":
        return functional.hardswish(source)
    if op.function == "hardsigmoid":
        # XNNPACK knows no hard sigmoid, only what it consists of.
        return functional.hardtanh(source * (1 / 6) + 0.5, 0.0, 1.0)
    if op.function == "silu":
        return source * torch.sigmoid(source)
    if op.function == "sigmoid":
        return torch.sigmoid(source)
    if op.function == "leaky_relu":
        return functional.leaky_relu(source, op.parameter)
    if op.function == "tanh":
        return torch.tanh(source)
    if op.function == "gelu":
        return functional.gelu(source)
    if op.function == "gelu_tanh":
        # XNNPACK takes it for the other GELU. Here as x / (1 + e^(-2u)), which is x (1 + tanh u) / 2.
        cubic = source * source * source * (2 * _ROOT_TWO_OVER_PI * 0.044715)
        return source * torch.sigmoid(source * (2 * _ROOT_TWO_OVER_PI) + cubic)
    if op.function == "elu":
        # XNNPACK's own is refused by ExecuTorch's partitioner where it is not quantized too.
        powers = torch.exp(functional.hardtanh(source, -80.0, 0.0))
        return functional.relu(source) + (powers * op.parameter - op.parameter)
    raise AssertionError(f"no torch operators for {op.function!r}")
