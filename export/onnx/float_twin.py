"""The fp32 twin as an ONNX model that takes `image`, the normalised image in float32 (N, C, H, W)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from fedmpq.export.float_network import FloatLayer, FloatNetwork, FloatStep
from fedmpq.export.format import INPUT_NAME, OUTPUT_NAME
from fedmpq.export.onnx.float_functions import function_of
from fedmpq.export.onnx.opset import IR_VERSION, OPSET
from fedmpq.export.onnx.shapes import rearranged
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.pooling import cover
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Lookup,
    MaxPool,
    Mul,
    Relu,
    Shape,
)
from fedmpq.model.ops import ShapeOp
from fedmpq.model.pools import windows_of


def lower_float(network: FloatNetwork) -> onnx.ModelProto:
    writer = OnnxWriter()
    names = {INPUT: INPUT_NAME}
    for step in network.steps:
        if isinstance(step, FloatLayer):
            names[step.output] = _layer(writer, step, names[step.source])
        else:
            names[step.output] = _plain(writer, step, [names[name] for name in step.sources])
    writer.node("Identity", [names[network.output]], output=OUTPUT_NAME)
    image: list[str | int] = ["N", *network.image]
    logits: list[str | int] = ["N", *network.logits]
    made = helper.make_graph(
        writer.nodes,
        network.name,
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, logits)],
        list(writer.constants.values()),
    )
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(made, opset_imports=opset, ir_version=IR_VERSION, producer_name="fedmpq")


def _layer(writer: OnnxWriter, step: FloatLayer, source: str) -> str:
    inputs = [source, writer.constant(step.weight), writer.constant(step.bias)]
    if not isinstance(step.op, Conv2d):
        return writer.node("Gemm", inputs, name=step.output, transB=1)
    attributes: dict[str, Any] = {"dilations": step.op.dilation, "group": step.op.groups, **_window(step.op)}
    return writer.node("Conv", inputs, name=step.output, **attributes)


def _plain(writer: OnnxWriter, step: FloatStep, inputs: list[str]) -> str:
    op = step.op
    if isinstance(op, Relu):
        if not op.maximum:
            return writer.node("Relu", inputs)
        bounds = [writer.constant(np.float32(bound)) for bound in (0, op.maximum)]
        return writer.node("Clip", [*inputs, *bounds])
    if isinstance(op, Add | Mul):
        return writer.node("Add" if isinstance(op, Add) else "Mul", inputs)
    if isinstance(op, Lookup):
        return function_of(writer, op, inputs[0])
    return _shaped(writer, op, step.shape, inputs)


def _shaped(writer: OnnxWriter, op: ShapeOp, shape: Shape, inputs: list[str]) -> str:
    if isinstance(op, Concat):
        return writer.node("Concat", inputs, axis=1)
    if isinstance(op, GlobalAvgPool):
        return writer.node("GlobalAveragePool", inputs)
    if isinstance(op, Flatten):
        return writer.node("Flatten", inputs)
    if isinstance(op, MaxPool):
        return writer.node("MaxPool", inputs, kernel_shape=op.kernel, ceil_mode=op.ceil_mode, **_window(op))
    if isinstance(op, AvgPool):
        window = {**_window(op), "ceil_mode": op.ceil_mode, "count_include_pad": not op.exclude_padding}
        return writer.node("AveragePool", inputs, kernel_shape=op.kernel, **window)
    if isinstance(op, AdaptiveAvgPool):
        return _adaptive(writer, op, inputs[0], shape)
    return rearranged(writer, op, inputs[0], writer.constant(np.float32(0)), shape)


def _adaptive(writer: OnnxWriter, op: AdaptiveAvgPool, source: str, shape: Shape) -> str:
    """Shares of rows and columns as two products of matrices."""
    windows = windows_of(op, shape)
    spans = (windows.rows, windows.columns)
    rows, columns = (cover(each, shape[1 + axis]) for axis, each in enumerate(spans))
    rows, columns = (each / each.sum(axis=1, keepdims=True) for each in (rows, columns))
    across = writer.node("MatMul", [source, writer.constant(np.ascontiguousarray(columns.T))])
    return writer.node("MatMul", [writer.constant(rows), across])


def _window(op: Conv2d | MaxPool | AvgPool) -> dict[str, Any]:
    return {"strides": op.stride, "pads": (*op.padding, *op.padding)}
