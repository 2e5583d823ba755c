"""Which calls of ATen are a `Lookup`, and which function each of them is."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmpq.model.ops import Lookup

_PLAIN = ("hardswish", "hardsigmoid", "silu", "sigmoid", "tanh")

LOOKUPS = tuple(f"aten.{name}.default" for name in (*_PLAIN, "leaky_relu", "gelu", "elu"))
"""The calls that `lookup_of` translates."""


def lookup_of(call: str, arguments: dict[str, Any]) -> Lookup:
    """The operation of one of `LOOKUPS`; `ValueError` says which argument has no place in a graph."""
    name = call.split(".")[1]
    if name == "gelu":
        return Lookup("gelu_tanh" if arguments["approximate"] == "tanh" else "gelu", 0.0)
    if name == "leaky_relu":
        return Lookup(name, _parameter("negative_slope", arguments["negative_slope"]))
    if name == "elu":
        for scale in ("scale", "input_scale"):
            if arguments[scale] != 1:
                raise ValueError(f"has {scale}={arguments[scale]}; use nn.ELU, where it is 1")
        return Lookup(name, _parameter("alpha", arguments["alpha"]))
    return Lookup(name, 0.0)


def _parameter(name: str, value: float) -> float:
    if not value >= 0:
        raise ValueError(f"has {name}={value}; it must not be negative")
    return float(np.float32(value))
