"""The integer steps of pools, concatenations and whatever moves codes about."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import AvgPool, Concat, Flatten, GlobalAvgPool, MaxPool, Node, Shape
from fedmpq.model.ops import ShapeOp
from fedmpq.model.pools import AdaptiveAvgPool, Windows, window_greatest, window_sums, windows_of
from fedmpq.model.rearrangements import Rearrangement, rearranged

Vector = NDArray[np.float32]
Codes = NDArray[np.int32]

NewFormat = Concat | AvgPool | GlobalAvgPool | AdaptiveAvgPool
"""What gives codes of another format than it reads."""


@dataclass(frozen=True)
class PoolMax:
    """The greatest code under each window; padding never wins."""

    output: str
    source: str
    op: MaxPool
    windows: Windows


@dataclass(frozen=True)
class PoolAverage:
    """`code = clamp(rint(float(sum of codes) * multiplier), low, high)`, a multiplier for each window."""

    output: str
    source: str
    op: AvgPool | GlobalAvgPool | AdaptiveAvgPool
    windows: Windows
    multipliers: Vector
    """By row and column of windows."""
    low: int
    high: int


@dataclass(frozen=True)
class ConcatCodes:
    """`code = clamp(rint(float(code) * multiplier), low, high)`, a multiplier for each source, joined."""

    output: str
    sources: tuple[str, ...]
    multipliers: tuple[np.float32, ...]
    low: int
    high: int


@dataclass(frozen=True)
class Rearrange:
    """Codes moved, zeros where nothing comes from."""

    output: str
    source: str
    op: Rearrangement


@dataclass(frozen=True)
class FlattenCodes:
    """Channels, then rows, then columns."""

    output: str
    source: str


ShapeStep = PoolMax | PoolAverage | ConcatCodes | FlattenCodes | Rearrange


def shape_step(
    node: Node, op: ShapeOp, formats: list[CodeFormat], source: Shape
) -> tuple[ShapeStep, CodeFormat]:
    """The step of a node that reads codes of these formats, its first input of shape `source`, and what the
    codes mean that it gives."""
    form, name = formats[0], node.inputs[0]
    if isinstance(op, MaxPool):
        return PoolMax(node.name, name, op, windows_of(op, source)), form
    if isinstance(op, Flatten):
        return FlattenCodes(node.name, name), form
    if isinstance(op, Concat):
        target = CodeFormat.joined(formats)
        multipliers = tuple(each.joining(target) for each in formats)
        return ConcatCodes(node.name, node.inputs, multipliers, target.low, target.high), target
    if isinstance(op, AvgPool | GlobalAvgPool | AdaptiveAvgPool):
        target, windows = form.averaged(), windows_of(op, source)
        multipliers_by_window = form.averaging(windows.sizes())
        step = PoolAverage(node.name, name, op, windows, multipliers_by_window, target.low, target.high)
        return step, target
    return Rearrange(node.name, name, op), form


def computed(step: ShapeStep, sources: list[Codes]) -> Codes:
    """What a step gives for codes `(N, H, W, C)`, or `(N, features)` where it flattens."""
    source = sources[0]
    if isinstance(step, PoolMax):
        return window_greatest(source, step.windows)
    if isinstance(step, PoolAverage):
        sums = window_sums(source.astype(np.int64), step.windows).astype(np.float32)
        return clamped(sums * step.multipliers[:, :, None], step.low, step.high)
    if isinstance(step, ConcatCodes):
        pairs = zip(sources, step.multipliers, strict=True)
        parts = [clamped(codes.astype(np.float32) * m, step.low, step.high) for codes, m in pairs]
        return np.concatenate(parts, axis=3)
    if isinstance(step, Rearrange):
        return rearranged(source, step.op)
    if source.ndim == 2:
        return source
    return source.transpose(0, 3, 1, 2).reshape(len(source), math.prod(source.shape[1:]))


def clamped(real: NDArray[np.float32], low: int, high: int) -> Codes:
    """`clamp(rint(real), low, high)`; `real` is overwritten."""
    assert real.dtype == np.float32
    np.rint(real, out=real)
    np.clip(real, low, high, out=real)
    return real.astype(np.int32)
