"""Concatenations and whatever moves values about in operators that XNNPACK takes, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedmpq.model.graph import ChannelShuffle, Pad, Shape, Size, Slice, Upsample
from fedmpq.model.rearrangements import channels_of

MOST_JOINED = 5
"""XNNPACK joins no more at a time."""


def joined(
    parts: Sequence[torch.Tensor], again: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """The channels of all parts, five at a time; `again` quantizes what is joined further."""
    while len(parts) > MOST_JOINED:
        some = torch.cat(list(parts[:MOST_JOINED]), dim=1)
        parts = [some if again is None else again(some), *parts[MOST_JOINED:]]
    return torch.cat(list(parts), dim=1)


def selection(op: Slice | ChannelShuffle, channels: int) -> NDArray[np.int8]:
    """The weight of a convolution of one pixel that gives these channels.

    XNNPACK cuts no tensor whose batch is not fixed.
    """
    chosen = channels_of(op, channels)
    return np.asarray(chosen[:, None] == np.arange(channels), np.int8)[:, :, None, None]


def padding(op: Pad, channels: int) -> tuple[NDArray[np.int8], Size]:
    """Weight and padding of a convolution channel by channel that adds zeros, more on one side than another.

    Of its kernel one element is 1. With `p` zeros on both sides and a kernel of `2p - before - after + 1`
    that has its 1 at `p - before`, output `y` is input `y - before`.
    """
    most = tuple(max(sides) for sides in zip(op.before, op.after, strict=True))
    kernel = [2 * p - before - after + 1 for p, before, after in zip(most, op.before, op.after, strict=True)]
    weight = np.zeros((channels, 1, *kernel), np.int8)
    weight[:, :, most[0] - op.before[0], most[1] - op.before[1]] = 1
    return weight, (most[0], most[1])


def copies(op: Upsample, shape: Shape) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Matrices `(out, in)` for rows and columns that repeat each element."""
    sides = zip(shape[1:], op.factor, strict=True)
    rows, columns = (np.eye(size, dtype=np.float32).repeat(times, axis=0) for size, times in sides)
    return rows, columns


def mixed(source: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, shape: Shape) -> torch.Tensor:
    """`rows @ source @ columns^T` for each channel; `rows` has shape (out, in, 1, 1).

    A linear layer over each row, then a convolution of one pixel that reads rows as channels: axes need not
    be exchanged for that, which XNNPACK would not take.
    """
    channels, height, width = shape
    across = functional.linear(source.reshape(-1, width), columns).reshape(-1, height, len(columns), 1)
    down = functional.conv2d(across, rows)
    return down.reshape(-1, channels, len(rows), len(columns))
