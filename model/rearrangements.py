"""Operations that only move elements: each element given is one that was read, or zero.

Codes keep their format, so nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.never import assert_never
from fedmpq.model.op_checks import MAX_DIMENSION, GraphError, Shape, Size, check_range, check_size, image


@dataclass(frozen=True)
class Slice:
    """The channels `start..stop - 1`."""

    start: int
    stop: int


@dataclass(frozen=True)
class ChannelShuffle:
    """Of `groups` runs of channels, equally long, the first of each, then the second of each, and so on."""

    groups: int


@dataclass(frozen=True)
class Pad:
    """Zeros around the image: so many rows and columns before it and after it."""

    before: Size
    after: Size


@dataclass(frozen=True)
class Upsample:
    """Every pixel as a block of `factor` equal ones: nearest neighbours."""

    factor: Size


Rearrangement = Slice | ChannelShuffle | Pad | Upsample


def rearranged_shape(op: Rearrangement, x: Shape) -> Shape:
    """The shape it gives; refuses a malformed one."""
    channels, height, width = image(x)
    if isinstance(op, Slice):
        check_range(f"the end of a slice of {channels} channels", op.stop, 1, channels)
        check_range(f"the start of a slice that ends at {op.stop}", op.start, 0, op.stop - 1)
        return (op.stop - op.start, height, width)
    if isinstance(op, ChannelShuffle):
        check_range("groups", op.groups, 1, MAX_DIMENSION)
        if channels % op.groups:
            raise GraphError(f"groups {op.groups} must divide {channels} channels")
        return x
    if isinstance(op, Pad):
        check_size("padding before", op.before, 0)
        check_size("padding after", op.after, 0)
        return (channels, height + op.before[0] + op.after[0], width + op.before[1] + op.after[1])
    if isinstance(op, Upsample):
        check_size("factor", op.factor, 1)
        return (channels, height * op.factor[0], width * op.factor[1])
    assert_never(op)


def rearranged(values: NDArray[Any], op: Rearrangement, fill: int = 0) -> NDArray[Any]:
    """Values `(N, H, W, C)` moved; where nothing comes from, `fill`."""
    if isinstance(op, Slice):
        return values[..., op.start : op.stop]
    if isinstance(op, ChannelShuffle):
        runs = values.reshape(*values.shape[:3], op.groups, -1)
        return runs.swapaxes(3, 4).reshape(values.shape)
    if isinstance(op, Pad):
        sides = zip(op.before, op.after, strict=True)
        return np.pad(values, ((0, 0), *sides, (0, 0)), constant_values=fill)
    if isinstance(op, Upsample):
        return values.repeat(op.factor[0], axis=1).repeat(op.factor[1], axis=2)
    assert_never(op)


def places(op: Rearrangement, source: Shape) -> NDArray[np.int32]:
    """For each element given (rows, columns, channels) which element of the source it is, or -1 for zero."""
    channels, height, width = source
    numbers = np.arange(channels * height * width, dtype=np.int32).reshape(1, height, width, channels)
    return np.ascontiguousarray(rearranged(numbers, op, fill=-1)).reshape(-1)


def channels_of(op: Rearrangement, channels: int) -> NDArray[np.int64]:
    """Which channel of the source each channel given is."""
    if isinstance(op, Pad | Upsample):
        return np.arange(channels)
    return rearranged(np.arange(channels).reshape(1, 1, 1, -1), op).reshape(-1)
