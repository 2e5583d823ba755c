"""Pools, concatenations and whatever moves codes about as standard ONNX operators on bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.operations import Operation
from fedmpq.export.pooling import cover, end_padding, is_even
from fedmpq.model.graph import AvgPool, ChannelShuffle, GlobalAvgPool, MaxPool, Pad, Shape, Slice, Upsample
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.rearrangements import Rearrangement
from fedmpq.model.shape_steps import PoolAverage, Rearrange


def window_attributes(op: MaxPool | AvgPool | GlobalAvgPool, source: Shape) -> dict[str, Any]:
    if isinstance(op, GlobalAvgPool):
        return {}
    return {"strides": op.stride, "pads": (*op.padding, *end_padding(op, source))}


def uneven_sums(writer: OnnxWriter, step: PoolAverage, real: str, source: Shape) -> str:
    """The sum under each window of whole numbers as float32, which holds it: two products of matrices."""
    rows, columns = cover(step.windows.rows, source[1]), cover(step.windows.columns, source[2])
    across = writer.node("MatMul", [real, writer.constant(np.ascontiguousarray(columns.T))])
    return writer.node("MatMul", [writer.constant(rows), across])


def rearranged(writer: OnnxWriter, op: Rearrangement, codes: str, zero: str, source: Shape) -> str:
    """Bytes moved; `zero` is the constant that stands for code 0."""
    channels, height, width = source
    if isinstance(op, Slice):
        bounds = [writer.constant(np.array([number], np.int64)) for number in (op.start, op.stop, 1)]
        return writer.node("Slice", [codes, *bounds])
    if isinstance(op, ChannelShuffle):
        runs = np.array([-1, op.groups, channels // op.groups, height, width], np.int64)
        whole = np.array([-1, channels, height, width], np.int64)
        grouped = writer.node("Reshape", [codes, writer.constant(runs)])
        turned = writer.node("Transpose", [grouped], perm=[0, 2, 1, 3, 4])
        return writer.node("Reshape", [turned, writer.constant(whole)])
    if isinstance(op, Pad):
        sides = np.array([0, 0, *op.before, 0, 0, *op.after], np.int64)
        return writer.node("Pad", [codes, writer.constant(sides), zero])
    if isinstance(op, Upsample):
        factors = writer.constant(np.array([1, 1, *op.factor], np.float32))
        nearest = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return writer.node("Resize", [codes, "", factors], mode="nearest", **nearest)
    assert_never(op)


def kept_operators(steps: Iterable[Operation]) -> Counter[str]:
    """Operators that the lowering of these is meant to leave in the optimized graph, and how many of each."""
    kept = Counter[str]()
    for step in steps:
        if isinstance(step, PoolAverage) and not is_even(step):
            kept["MatMul"] += 2
        elif isinstance(step, Rearrange) and isinstance(step.op, Slice | Pad):
            kept[type(step.op).__name__] += 1
        elif isinstance(step, LookupCodes):
            # A table of codes where no float function gives it.
            kept["Gather"] += 1
    # Slices that share out the channels of one value become one Split.
    kept["Split"] = kept["Slice"] // 2
    return kept
