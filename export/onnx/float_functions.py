"""Pointwise functions as standard ONNX operators in float32."""

from __future__ import annotations

from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.model.ops import Lookup

_PLAIN = {"sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish"}
_WITH_ALPHA = {"leaky_relu": "LeakyRelu", "elu": "Elu"}


def function_of(writer: OnnxWriter, op: Lookup, source: str) -> str:
    """The name of the function's value."""
    if op.function in _PLAIN:
        return writer.node(_PLAIN[op.function], [source])
    if op.function in _WITH_ALPHA:
        return writer.node(_WITH_ALPHA[op.function], [source], alpha=op.parameter)
    if op.function == "hardsigmoid":
        return writer.node("HardSigmoid", [source], alpha=1 / 6, beta=0.5)
    if op.function == "silu":
        return writer.node("Mul", [source, writer.node("Sigmoid", [source])])
    if op.function == "gelu":
        return writer.node("Gelu", [source])
    if op.function == "gelu_tanh":
        return writer.node("Gelu", [source], approximate="tanh")
    raise AssertionError(f"no ONNX operators for {op.function!r}")
