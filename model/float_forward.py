"""The float network that a graph was traced from, in NumPy: what its activations are before any rounding.

Quantizers hand on what they read. Values are `(N, H, W, C)`, or `(N, features)` behind a Flatten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
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
    Quantize,
    Relu,
)
from fedmpq.model.never import assert_never
from fedmpq.model.ops import ShapeOp
from fedmpq.model.pointwise import evaluated
from fedmpq.model.pools import PoolOp, Windows, window_greatest, window_sums, windows_of
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.rearrangements import rearranged

Real = NDArray[np.float32]


def float_values(
    graph: Graph, weights: Weights, side: Side, images: NDArray[np.uint8]
) -> Iterator[tuple[Node, Real]]:
    """Each node with its value, in order; a value is let go once nothing reads it any more."""
    image = graph.input
    values = {INPUT: (images.astype(np.float32) - image.zero_point) * np.float32(image.scale)}
    left = {node.name: len(graph.consumers[node.name]) for node in graph.nodes}
    for node in graph.nodes:
        value = _value(node, [values[name] for name in node.inputs], weights, side)
        values[node.name] = value
        yield node, value
        for name in node.inputs:
            if name != INPUT:
                left[name] -= 1
                if left[name] == 0:
                    del values[name]


def float_logits(graph: Graph, weights: Weights, side: Side, images: NDArray[np.uint8]) -> Real:
    """The output of the network."""
    values = float_values(graph, weights, side, images)
    return next(value for node, value in values if node.name == graph.output)


def _value(node: Node, inputs: list[Real], weights: Weights, side: Side) -> Real:
    op, source = node.op, inputs[0]
    if isinstance(op, Conv2d | Linear):
        weight = weights[node.name]
        product = source @ weight.T if isinstance(op, Linear) else _conv(source, weight, op)
        value = product + side[f"{node.name}.bias"] if op.bias else product
    elif isinstance(op, BatchNorm):
        scale = side[f"{node.name}.weight"] / np.sqrt(side[f"{node.name}.running_var"] + np.float32(op.eps))
        value = (source - side[f"{node.name}.running_mean"]) * scale + side[f"{node.name}.bias"]
    elif isinstance(op, Relu):
        value = np.clip(source, 0, op.maximum if op.maximum > 0 else None)
    elif isinstance(op, Add):
        value = source + inputs[1]
    elif isinstance(op, Mul):
        value = source * inputs[1]
    elif isinstance(op, ShapeOp):
        value = _shaped(op, inputs)
    elif isinstance(op, Lookup):
        value, _ = evaluated(op.function, op.parameter, source)
    elif isinstance(op, Quantize):
        value = source
    else:
        assert_never(op)
    return np.asarray(value, np.float32)


def _conv(source: Real, weight: Real, op: Conv2d) -> Real:
    """By im2col and BLAS, group by group."""
    (ph, pw), (sh, sw), (dh, dw) = op.padding, op.stride, op.dilation
    reach = tuple(d * (k - 1) + 1 for d, k in zip(op.dilation, op.kernel, strict=True))
    padded = np.pad(source, ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    taps = sliding_window_view(padded, reach, axis=(1, 2))[:, ::sh, ::sw, :, ::dh, ::dw]
    batch, height, width = taps.shape[:3]
    fan_in = math.prod(weight.shape[1:])
    columns = taps.reshape(batch * height * width, op.groups, fan_in)
    sums = np.matmul(columns.transpose(1, 0, 2), weight.reshape(op.groups, -1, fan_in).transpose(0, 2, 1))
    return np.asarray(sums.transpose(1, 0, 2).reshape(batch, height, width, len(weight)), np.float32)


def _shaped(op: ShapeOp, inputs: list[Real]) -> Real:
    source = inputs[0]
    if isinstance(op, MaxPool):
        return window_greatest(source, _windows(op, source))
    if isinstance(op, GlobalAvgPool):
        return np.asarray(source.mean(axis=(1, 2), keepdims=True), np.float32)
    if isinstance(op, AvgPool | AdaptiveAvgPool):
        windows = _windows(op, source)
        sizes = windows.sizes()[:, :, None].astype(np.float32)
        return np.asarray(window_sums(source, windows) / sizes, np.float32)
    if isinstance(op, Concat):
        return np.concatenate(inputs, axis=3)
    if isinstance(op, Flatten):
        return source if source.ndim == 2 else source.transpose(0, 3, 1, 2).reshape(len(source), -1)
    return rearranged(source, op)


def _windows(op: PoolOp, source: Real) -> Windows:
    _, height, width, channels = source.shape
    return windows_of(op, (channels, height, width))
