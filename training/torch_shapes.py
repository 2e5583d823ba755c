"""Pools, concatenations and whatever moves elements about in torch, each with its backward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmpq.model.activations import CodeFormat
from fedmpq.model.dropout import Dropout, kept
from fedmpq.model.never import assert_never
from fedmpq.model.ops import (
    AdaptiveAvgPool,
    AvgPool,
    ChannelShuffle,
    Concat,
    Flatten,
    GlobalAvgPool,
    MaxPool,
    Pad,
    ShapeOp,
    Slice,
    Upsample,
)
from fedmpq.model.pools import windows_of
from fedmpq.model.randomness import Draws
from fedmpq.model.rearrangements import Rearrangement
from fedmpq.training.torch_ops import Backward, Value


def apply(op: ShapeOp, inputs: list[Value]) -> tuple[Value, Backward]:
    """What the operation gives for its inputs, and its backward pass."""
    value = inputs[0]
    if isinstance(op, MaxPool):
        return max_pool(value, op)
    if isinstance(op, AvgPool | GlobalAvgPool | AdaptiveAvgPool):
        return average_pool(value, op)
    if isinstance(op, Concat):
        return concat(inputs)
    if isinstance(op, Flatten):
        return flatten(value)
    return rearrange(value, op)


def max_pool(value: Value, op: MaxPool) -> tuple[Value, Backward]:
    codes, form = value.codes()
    window = op.kernel, op.stride, op.padding, (1, 1), op.ceil_mode
    out, indices = torch.ops.aten.max_pool2d_with_indices(codes, *window)
    shape = codes.shape

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        source = gradient.new_empty(shape)
        return (torch.ops.aten.max_pool2d_with_indices_backward(gradient, source, *window, indices),)

    return Value(out, form), backward


def average_pool(value: Value, op: AvgPool | GlobalAvgPool | AdaptiveAvgPool) -> tuple[Value, Backward]:
    """Average of codes, itself as 8-bit codes."""
    codes, form = value.codes()
    target = form.averaged()
    shape, (channels, height, width) = codes.shape, codes.shape[1:]
    windows = windows_of(op, (channels, height, width))
    # The integer program's own multipliers: averages often lie halfway between two codes.
    multipliers = torch.from_numpy(form.averaging(windows.sizes()))
    pooled = torch.round(_sums(codes, op) * multipliers).clamp_(target.low, target.high)
    return Value(pooled, target), lambda gradient: (_spread(gradient, gradient.new_empty(shape), op),)


def _sums(codes: Tensor, op: AvgPool | GlobalAvgPool | AdaptiveAvgPool) -> Tensor:
    """The sum under each window, exact: float32 holds it."""
    if isinstance(op, AvgPool):
        return functional.avg_pool2d(
            codes, op.kernel, op.stride, op.padding, op.ceil_mode, divisor_override=1
        )
    if isinstance(op, GlobalAvgPool):
        return functional.avg_pool2d(codes, codes.shape[2:], divisor_override=1)
    sides = zip(codes.shape[2:], op.size, strict=True)
    rows, columns = (
        functional.adaptive_avg_pool1d(torch.eye(old), new).t().gt(0).float() for old, new in sides
    )
    return rows @ codes @ columns.t()


def _spread(gradient: Tensor, source: Tensor, op: AvgPool | GlobalAvgPool | AdaptiveAvgPool) -> Tensor:
    """Shares of each mean's gradient to all under its window; `source` has the shape of what was read."""
    spread: Tensor
    if isinstance(op, AdaptiveAvgPool):
        spread = torch.ops.aten._adaptive_avg_pool2d_backward(gradient, source)
    elif isinstance(op, GlobalAvgPool):
        whole = source.shape[2:]
        spread = torch.ops.aten.avg_pool2d_backward(gradient, source, whole, whole, [0, 0], False, True, None)
    else:
        window = op.kernel, op.stride, op.padding, op.ceil_mode, not op.exclude_padding
        spread = torch.ops.aten.avg_pool2d_backward(gradient, source, *window, None)
    return spread


def concat(inputs: list[Value]) -> tuple[Value, Backward]:
    """The channels of all, each rounded to codes of the format that they share."""
    pairs = [value.codes() for value in inputs]
    target = CodeFormat.joined([form for _, form in pairs])
    parts = [
        torch.round(codes * float(form.joining(target))).clamp_(target.low, target.high)
        for codes, form in pairs
    ]
    sizes = [codes.shape[1] for codes, _ in pairs]
    return Value(torch.cat(parts, dim=1), target), lambda gradient: gradient.split(sizes, dim=1)


def rearrange(value: Value, op: Rearrangement) -> tuple[Value, Backward]:
    """Autograd's own backward pass: of functions that only move elements it is what it should be."""
    codes, form = value.codes()
    shape = codes.shape

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            source = torch.zeros(shape, requires_grad=True)
            (spread,) = torch.autograd.grad(_moved(source, op), source, gradient)
        return (spread,)

    return Value(_moved(codes, op), form), backward


def _moved(values: Tensor, op: Rearrangement) -> Tensor:
    if isinstance(op, Slice):
        return values[:, op.start : op.stop]
    if isinstance(op, ChannelShuffle):
        return functional.channel_shuffle(values, op.groups)
    if isinstance(op, Pad):
        (top, left), (bottom, right) = op.before, op.after
        return functional.pad(values, (left, right, top, bottom))
    if isinstance(op, Upsample):
        return functional.interpolate(values, scale_factor=op.factor)
    assert_never(op)


def drop(value: Value, dropout: Dropout, draws: Draws, layer: int, step: int) -> tuple[Value, Backward]:
    """Some codes become 0; those that stay have a larger scale."""
    codes, form = value.codes()
    # Channels last, as the numbers are drawn.
    stays = kept(dropout, draws, layer, step, tuple(codes.movedim(1, -1).shape))
    mask = torch.from_numpy(stays.copy()).movedim(-1, 1)
    larger = replace(form, scale=np.float32(form.scale * dropout.factor))
    return Value(codes * mask, larger), lambda gradient: (gradient * mask * float(dropout.factor),)


def flatten(value: Value) -> tuple[Value, Backward]:
    shape = value.tensor.shape
    return (
        Value(value.tensor.reshape(shape[0], -1), value.form),
        lambda gradient: (gradient.reshape(shape),),
    )
