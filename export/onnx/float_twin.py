"""The fp32 twin as an ONNX model that takes `image`, the normalised image in float32 (N, C, H, W)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from fedmpq.export.float_network import FloatLayer, FloatNetwork, PlainOp
from fedmpq.export.format import INPUT_NAME, OUTPUT_NAME
from fedmpq.export.onnx.float_functions import function_of
from fedmpq.export.onnx.functions import IR_VERSION, OPSET
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Lookup,
    MaxPool,
    Mul,
    Relu,
)
from fedmpq.model.never import assert_never


def lower_float(network: FloatNetwork) -> onnx.ModelProto:
    writer = OnnxWriter()
    names = {INPUT: INPUT_NAME}
    for step in network.steps:
        if isinstance(step, FloatLayer):
            names[step.output] = _layer(writer, step, names[step.source])
        else:
            names[step.output] = _plain(writer, step.op, [names[name] for name in step.sources])
    writer.node("Identity", [names[network.output]], output=OUTPUT_NAME)
    image: list[str | int] = ["N", *network.image]
    logits: list[str | int] = ["N", *network.logits]
    made = helper.make_graph(
        writer.nodes,
        network.name,
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, logits)],
        writer.constants,
    )
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(made, opset_imports=opset, ir_version=IR_VERSION, producer_name="fedmpq")


def _layer(writer: OnnxWriter, step: FloatLayer, source: str) -> str:
    inputs = [source, writer.constant(step.weight), writer.constant(step.bias)]
    if not isinstance(step.op, Conv2d):
        return writer.node("Gemm", inputs, name=step.output, transB=1)
    attributes: dict[str, Any] = {"dilations": step.op.dilation, "group": step.op.groups, **_window(step.op)}
    return writer.node("Conv", inputs, name=step.output, **attributes)


def _plain(writer: OnnxWriter, op: PlainOp, inputs: list[str]) -> str:
    if isinstance(op, Relu):
        if not op.maximum:
            return writer.node("Relu", inputs)
        bounds = [writer.constant(np.float32(bound)) for bound in (0, op.maximum)]
        return writer.node("Clip", [*inputs, *bounds])
    if isinstance(op, Add | Mul):
        return writer.node("Add" if isinstance(op, Add) else "Mul", inputs)
    if isinstance(op, GlobalAvgPool):
        return writer.node("GlobalAveragePool", inputs)
    if isinstance(op, Flatten):
        return writer.node("Flatten", inputs)
    if isinstance(op, MaxPool):
        return writer.node("MaxPool", inputs, kernel_shape=op.kernel, **_window(op))
    if isinstance(op, AvgPool):
        window = _window(op)
        return writer.node("AveragePool", inputs, count_include_pad=1, kernel_shape=op.kernel, **window)
    if isinstance(op, Lookup):
        return function_of(writer, op, inputs[0])
    assert_never(op)


def _window(op: Conv2d | MaxPool | AvgPool) -> dict[str, Any]:
    return {"strides": op.stride, "pads": (*op.padding, *op.padding)}
