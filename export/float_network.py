"""The fp32 twin of a quantized network: what an exported model's speed is compared with, in any runtime.

BatchNorm is folded into its layer and activations are not quantized, so neither has a step here. The network
takes the normalised image in float32 (N, C, H, W): scaling pixels is not counted against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Pad,
    Quantize,
    Relu,
    Shape,
    Slice,
    Upsample,
)

Array = NDArray[np.float32]
Tensors = Mapping[str, Array]
PlainOp = (
    Relu
    | Add
    | Concat
    | MaxPool
    | AvgPool
    | GlobalAvgPool
    | AdaptiveAvgPool
    | Flatten
    | Slice
    | ChannelShuffle
    | Pad
    | Upsample
    | Lookup
    | Mul
)


@dataclass(frozen=True)
class FloatLayer:
    """A convolution or linear layer with its bias, BatchNorm folded in."""

    output: str
    source: str
    op: Conv2d | Linear
    weight: Array
    bias: Array


@dataclass(frozen=True)
class FloatStep:
    """An operation without weights; `Add`, `Mul` and `Concat` have several sources, the others have one."""

    output: str
    sources: tuple[str, ...]
    op: PlainOp
    shape: Shape
    """Of one sample of its first source."""


@dataclass(frozen=True, eq=False)
class FloatNetwork:
    """Steps in execution order, from the value `INPUT` to the value `output`, the logits."""

    name: str
    image: Shape
    """Channels, height and width of one sample."""
    logits: Shape
    steps: tuple[FloatLayer | FloatStep, ...]
    output: str


def float_network(graph: Graph, weights: Tensors, side: Tensors) -> FloatNetwork:
    """The twin of `graph` with these full-precision weights by layer and side tensors by name."""
    steps: list[FloatLayer | FloatStep] = []
    # What vanishes has the name of what it reads.
    names = {INPUT: INPUT}
    for node in graph.nodes:
        op, sources = node.op, tuple(names[name] for name in node.inputs)
        names[node.name] = node.name
        if isinstance(op, Conv2d | Linear):
            weight, bias = _folded(graph, node, op, weights, side)
            steps.append(FloatLayer(node.name, sources[0], op, weight, bias))
        elif isinstance(op, BatchNorm) and not graph.folds(node):
            steps.append(_scaled(node, op, sources[0], side))
        elif isinstance(op, BatchNorm | Quantize):
            names[node.name] = sources[0]
        else:
            steps.append(FloatStep(node.name, sources, op, graph.shapes[node.inputs[0]]))
    return FloatNetwork(
        graph.name, graph.input.shape, graph.shapes[graph.output], tuple(steps), names[graph.output]
    )


def normalised(graph: Graph, images: NDArray[np.uint8]) -> Array:
    """Pixels (N, H, W, C) as the fp32 network takes them: `scale * (pixel - zero_point)`, (N, C, H, W)."""
    centred = images.transpose(0, 3, 1, 2).astype(np.float32) - np.float32(graph.input.zero_point)
    return np.ascontiguousarray(centred * np.float32(graph.input.scale))


def _folded(
    graph: Graph, node: Node, op: Conv2d | Linear, weights: Tensors, side: Tensors
) -> tuple[Array, Array]:
    """A layer's weight and bias with the BatchNorm that reads it, if any."""
    weight = weights[node.name]
    bias = side[f"{node.name}.bias"] if op.bias else np.zeros(len(weight), np.float32)
    reader = graph.by_name.get(next(iter(graph.consumers[node.name]), ""))
    if reader is not None and isinstance(reader.op, BatchNorm):
        factor, shift = _affine(reader, reader.op, side)
        weight = weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))
        bias = shift + bias * factor
    return weight.astype(np.float32), bias.astype(np.float32)


def _scaled(node: Node, op: BatchNorm, source: str, side: Tensors) -> FloatLayer:
    """A BatchNorm that melts into no layer, as a convolution of one pixel."""
    factor, shift = _affine(node, op, side)
    conv = Conv2d(op.channels, op.channels, (1, 1), (1, 1), (0, 0), (1, 1), op.channels, bias=True)
    return FloatLayer(node.name, source, conv, factor.reshape(-1, 1, 1, 1), shift)


def _affine(node: Node, op: BatchNorm, side: Tensors) -> tuple[Array, Array]:
    """`(factor, shift)` by channel: BatchNorm in evaluation is `x * factor + shift`."""
    parts = ("weight", "bias", "running_mean", "running_var")
    gamma, beta, mean, variance = (side[f"{node.name}.{part}"] for part in parts)
    deviation: Array = np.sqrt(np.maximum(variance, np.float32(0)) + np.float32(op.eps))
    factor = np.asarray(gamma / deviation, np.float32)
    return factor, np.asarray(beta - mean * factor, np.float32)
