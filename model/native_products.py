"""The integer forward's sums of products by the C++ kernels: NumPy's integers, many times faster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.bound import conv_forward
from fedmpq.kernels.tensors import Conv, StoredCodes
from fedmpq.model.integer_forward import Codes
from fedmpq.model.ops import Conv2d, Linear

Doubles = NDArray[np.float64]


def native_products(
    codes: Codes, weight: NDArray[np.int8], op: Conv2d | Linear, bound: int, threads: int = 1
) -> Codes:
    """For `integer_forward.logits(products=...)`; codes span at most 255, as all of a graph's do."""
    return _products(codes, weight, op, threads, None)


def summed_products(
    codes: Codes, weight: NDArray[np.int8], op: Conv2d | Linear, threads: int
) -> tuple[Codes, Doubles, Doubles]:
    """The same, and for each output channel their sum and the sum of their squares."""
    channels = op.out_features if isinstance(op, Linear) else op.out_channels
    totals = np.empty((2, channels), np.float64)
    products = _products(codes, weight, op, threads, totals)
    return products, totals[0], totals[1]


def _products(
    codes: Codes, weight: NDArray[np.int8], op: Conv2d | Linear, threads: int, totals: Doubles | None
) -> Codes:
    zero = max(0, -int(codes.min(initial=0)))
    stored = np.empty(codes.shape, np.uint8)
    np.add(codes, zero, out=stored, casting="unsafe")
    height, width = (1, 1) if isinstance(op, Linear) else codes.shape[1:3]
    conv = conv_of(op, len(codes), height, width)
    sums = np.empty(conv.images * conv.outputs, np.int32)
    source = StoredCodes(stored.reshape(-1), False, zero)
    conv_forward(conv, source, np.ascontiguousarray(weight), threads, sums, totals)()
    if isinstance(op, Linear):
        return sums.reshape(conv.images, conv.out_channels)
    return sums.reshape(conv.images, conv.out_height, conv.out_width, conv.out_channels)


def conv_of(op: Conv2d | Linear, images: int, height: int, width: int) -> Conv:
    """The window that a layer is to the kernels; one of a single pixel for a linear layer."""
    if isinstance(op, Linear):
        return Conv.over(images, (op.in_features, height, width), out_channels=op.out_features)
    window = op.kernel, op.stride, op.padding, op.dilation, op.out_channels, op.groups
    return Conv.over(images, (op.in_channels, height, width), *window)
