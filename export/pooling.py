"""What the lowerings of pools have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import AvgPool, GlobalAvgPool, MaxPool, Shape, Size
from fedmpq.model.pools import Span, pooled_shape
from fedmpq.model.shape_steps import PoolAverage


def end_padding(op: MaxPool | AvgPool, source: Shape) -> Size:
    """Rows and columns behind the image; in ceil mode as many as the last window needs."""
    if not op.ceil_mode:
        return op.padding
    counts = pooled_shape(op, source)[1:]
    axes = zip(counts, op.stride, op.kernel, source[1:], op.padding, strict=True)
    rows, columns = (max(0, (n - 1) * stride + kernel - size - pad) for n, stride, kernel, size, pad in axes)
    return rows, columns


def is_even(step: PoolAverage) -> bool:
    """Whether a convolution computes it: all windows divide by the same number and need equal padding."""
    if isinstance(step.op, GlobalAvgPool):
        return True
    alike = bool((step.multipliers == step.multipliers[0, 0]).all())
    return alike and isinstance(step.op, AvgPool) and not step.op.ceil_mode


def cover(spans: Sequence[Span], size: int) -> NDArray[np.float32]:
    """`(spans, size)`: 1 for each element that a span covers, else 0."""
    places = np.arange(size)
    return np.array([(places >= span.start) & (places < span.stop) for span in spans], np.float32)
