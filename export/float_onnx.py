"""The same network in fp32 as an ONNX model: what an exported model's speed is compared with.

BatchNorm is folded into its layer and activations are not quantized. It takes `image`, the normalised image
in float32 (N, C, H, W): scaling pixels is not counted against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from fedmpq.export.format import INPUT_NAME, OUTPUT_NAME
from fedmpq.export.onnx_functions import IR_VERSION, OPSET
from fedmpq.export.onnx_writer import OnnxWriter
from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    MaxPool,
    Node,
    Quantize,
    Relu,
)

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]


def lower_float(graph: Graph, weights: Tensors, side: Tensors) -> onnx.ModelProto:
    """`weights` by layer and `side` tensors by name, as `graph` says."""
    writer = OnnxWriter()
    names = {INPUT: INPUT_NAME}
    for node in graph.nodes:
        inputs = [names[name] for name in node.inputs]
        if isinstance(node.op, Conv2d | Linear):
            names[node.name] = _layer(writer, graph, node, inputs[0], weights, side)
        elif isinstance(node.op, BatchNorm | Quantize):
            names[node.name] = inputs[0]
        else:
            names[node.name] = _plain(writer, node, inputs)
    writer.node("Identity", [names[graph.output]], output=OUTPUT_NAME)
    image: list[str | int] = ["N", *graph.input.shape]
    logits: list[str | int] = ["N", *graph.shapes[graph.output]]
    made = helper.make_graph(
        writer.nodes,
        graph.name,
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, logits)],
        writer.constants,
    )
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(made, opset_imports=opset, ir_version=IR_VERSION, producer_name="fedmpq")


def normalised(graph: Graph, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels (N, H, W, C) as the fp32 model takes them: `scale * (pixel - zero_point)`, (N, C, H, W)."""
    centred = images.transpose(0, 3, 1, 2).astype(np.float32) - np.float32(graph.input.zero_point)
    return np.ascontiguousarray(centred * np.float32(graph.input.scale))


def _layer(writer: OnnxWriter, graph: Graph, node: Node, source: str, weights: Tensors, side: Tensors) -> str:
    op = node.op
    assert isinstance(op, Conv2d | Linear)
    inputs = [source, *(writer.constant(tensor) for tensor in folded(graph, node, weights, side))]
    if isinstance(op, Linear):
        return writer.node("Gemm", inputs, name=node.name, transB=1)
    attributes: dict[str, Any] = {"dilations": op.dilation, "group": op.groups, **_window(op)}
    return writer.node("Conv", inputs, name=node.name, **attributes)


def folded(graph: Graph, node: Node, weights: Tensors, side: Tensors) -> tuple[Array, Array]:
    """A layer's weight and bias with the BatchNorm that reads it, if any."""
    op, weight = node.op, weights[node.name]
    assert isinstance(op, Conv2d | Linear)
    bias = side[f"{node.name}.bias"] if op.bias else np.zeros(len(weight), np.float32)
    reader = graph.by_name.get(next(iter(graph.consumers[node.name]), ""))
    if reader is not None and isinstance(reader.op, BatchNorm):
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, variance = (side[f"{reader.name}.{part}"] for part in parts)
        deviation: NDArray[np.float32] = np.sqrt(
            np.maximum(variance, np.float32(0)) + np.float32(reader.op.eps)
        )
        factor = gamma / deviation
        weight = weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
        bias = beta + (bias - mean) * factor
    return weight.astype(np.float32), bias.astype(np.float32)


def _plain(writer: OnnxWriter, node: Node, inputs: list[str]) -> str:
    op = node.op
    if isinstance(op, Relu):
        if not op.maximum:
            return writer.node("Relu", inputs)
        bounds = [writer.constant(np.float32(bound)) for bound in (0, op.maximum)]
        return writer.node("Clip", [*inputs, *bounds])
    if isinstance(op, Add):
        return writer.node("Add", inputs)
    if isinstance(op, GlobalAvgPool):
        return writer.node("GlobalAveragePool", inputs)
    if isinstance(op, Flatten):
        return writer.node("Flatten", inputs)
    assert isinstance(op, MaxPool | AvgPool)
    attributes: dict[str, Any] = {"kernel_shape": op.kernel, **_window(op)}
    if isinstance(op, MaxPool):
        return writer.node("MaxPool", inputs, **attributes)
    return writer.node("AveragePool", inputs, count_include_pad=1, **attributes)


def _window(op: Conv2d | MaxPool | AvgPool) -> dict[str, Any]:
    return {"strides": op.stride, "pads": (*op.padding, *op.padding)}
