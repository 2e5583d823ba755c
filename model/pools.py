"""Pools: which elements lie under each window, and how many a mean divides by.

Windows are those of torch. With `ceil_mode` there is one more window along an axis where elements are left
over, unless it would begin behind the image and its padding on the first side; it ends with the padding on
the other side. An adaptive pool to `n` of `size` elements has window `i` from `floor(i * size / n)` to
`ceil((i + 1) * size / n)`, the last left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.op_checks import GraphError, Shape, Size, check_range, check_size, image, slide


@dataclass(frozen=True)
class MaxPool:
    """Greatest value under each window; padding never wins."""

    kernel: Size
    stride: Size
    padding: Size
    ceil_mode: bool = False


@dataclass(frozen=True)
class AvgPool:
    """Sum of the elements under each window over the window's size: padding counts as zeros.

    With `exclude_padding` the size is that of the window's part in the image.
    """

    kernel: Size
    stride: Size
    padding: Size
    ceil_mode: bool = False
    exclude_padding: bool = False


@dataclass(frozen=True)
class GlobalAvgPool:
    """Mean over rows and columns, `(C, H, W)` to `(C, 1, 1)`."""


@dataclass(frozen=True)
class AdaptiveAvgPool:
    """Means of as many windows as `size` says, which cover the image evenly and may overlap by an element."""

    size: Size


PoolOp = MaxPool | AvgPool | GlobalAvgPool | AdaptiveAvgPool


@dataclass(frozen=True)
class Span:
    """The elements `start..stop - 1` of an axis, all within the image; a mean counts `size` of them."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Windows:
    """Under window `(y, x)` lie the rows of `rows[y]` and the columns of `columns[x]`."""

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    def sizes(self) -> NDArray[np.int64]:
        """How many elements each mean divides by, `(rows, columns)`."""
        rows, columns = (np.array([span.size for span in spans]) for spans in (self.rows, self.columns))
        return np.asarray(rows[:, None] * columns, np.int64)

    @property
    def most_covered(self) -> int:
        """The most elements of one channel that lie under a window."""
        rows, columns = (max(span.stop - span.start for span in each) for each in (self.rows, self.columns))
        return rows * columns

    def covered(self) -> int:
        """The elements of one channel under all windows together."""
        rows, columns = (sum(span.stop - span.start for span in each) for each in (self.rows, self.columns))
        return rows * columns


def pooled_shape(op: PoolOp, x: Shape) -> Shape:
    """The shape that a pool gives; refuses a malformed one."""
    channels, height, width = image(x)
    if isinstance(op, GlobalAvgPool):
        return (channels, 1, 1)
    if isinstance(op, AdaptiveAvgPool):
        check_size("size", op.size, 1)
        return (channels, *op.size)
    check_size("kernel", op.kernel, 1)
    check_size("stride", op.stride, 1)
    for kernel, padding in zip(op.kernel, op.padding, strict=True):
        check_range(f"padding of a kernel of {kernel}", padding, 0, kernel // 2)
    axes = zip((height, width), op.kernel, op.stride, op.padding, strict=True)
    return (channels, *(_windows_along(*axis, op.ceil_mode) for axis in axes))


def windows_of(op: PoolOp, source: Shape) -> Windows:
    """The windows of a pool over images of the shape `source`."""
    rows, columns = (_spans(op, axis, source[1 + axis]) for axis in (0, 1))
    return Windows(rows, columns)


def window_sums(values: NDArray[Any], windows: Windows) -> NDArray[Any]:
    """The sum under each window of values `(N, H, W, C)`."""
    for axis, spans in ((1, windows.rows), (2, windows.columns)):
        starts, stops = _ends(spans)
        total = None
        for offset in range(int((stops - starts).max())):
            inside = np.expand_dims((starts + offset < stops).astype(values.dtype), tuple(range(1, 4 - axis)))
            part = np.take(values, np.minimum(starts + offset, stops - 1), axis) * inside
            total = part if total is None else total + part
        values = np.asarray(total)
    return values


def window_greatest(values: NDArray[Any], windows: Windows) -> NDArray[Any]:
    """The greatest under each window of values `(N, H, W, C)`."""
    for axis, spans in ((1, windows.rows), (2, windows.columns)):
        starts, stops = _ends(spans)
        greatest = np.take(values, starts, axis)
        for offset in range(1, int((stops - starts).max())):
            part = np.take(values, np.minimum(starts + offset, stops - 1), axis)
            np.maximum(greatest, part, out=greatest)
        values = greatest
    return values


def _ends(spans: tuple[Span, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    starts, stops = (
        np.array(each, np.int64) for each in zip(*((s.start, s.stop) for s in spans), strict=True)
    )
    return starts, stops


def _windows_along(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    if not ceil_mode:
        return slide(size, kernel, stride, padding, dilation=1)
    count = -(-(size + 2 * padding - kernel) // stride) + 1
    if (count - 1) * stride >= size + padding:
        count -= 1
    if count < 1:
        raise GraphError(
            f"a window of {kernel} with stride {stride} does not fit {size} elements padded by {padding} on"
            " each side: use a smaller kernel or more padding"
        )
    return count


def _spans(op: PoolOp, axis: int, size: int) -> tuple[Span, ...]:
    if isinstance(op, GlobalAvgPool):
        return (Span(0, size, size),)
    if isinstance(op, AdaptiveAvgPool):
        count = op.size[axis]
        ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        return tuple(Span(start, stop, stop - start) for start, stop in ends)
    kernel, stride, padding = op.kernel[axis], op.stride[axis], op.padding[axis]
    spans = []
    for i in range(_windows_along(size, kernel, stride, padding, op.ceil_mode)):
        first = i * stride - padding
        end = min(first + kernel, size + padding)
        start, stop = max(first, 0), min(end, size)
        inside_only = isinstance(op, AvgPool) and op.exclude_padding
        spans.append(Span(start, stop, stop - start if inside_only else end - first))
    return tuple(spans)
