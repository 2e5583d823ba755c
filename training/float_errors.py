"""Both backward products of a layer in float32 NumPy, from errors that were not rounded to 8 bits.

They exist to measure what 8-bit errors cost. They are slow, and since a BLAS adds up in an order of its own,
not the same to the bit on every machine.

With `a` the codes (image, row, column, channel), zero-padded, `e` the errors of the output, `w` the weights
(output, input / groups, row, column) and `s`, `p`, `d` stride, padding and dilation, within each group:

    weight gradient [o, i, r, c] = sum over n, y, x of e[n, y, x, o] * a[n, s*y + d*r - p, s*x + d*c - p, i]
    input gradient [n, s*y + d*r - p, s*x + d*c - p, i] = sum over o, r, c of e[n, y, x, o] * w[o, i, r, c]

As matrix products, image by image, with what lies under the kernel at each pixel laid out in a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Conv

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
"""bfloat16: the upper half of a float32."""

_PRODUCTS_AT_ONCE = 2**22


def weight_gradient(conv: Conv, codes: Floats, errors: Floats) -> Floats:
    """Codes (image, row, column, channel), errors in the order of the output; shaped as the weights."""
    padded = np.pad(codes, ((0, 0), (conv.pad_h,) * 2, (conv.pad_w,) * 2, (0, 0)))
    under = np.stack([_by_group(padded[where], conv) for where in _taps(conv)], axis=4)
    rows = under.reshape(conv.images, conv.groups, conv.pixels, _fan_in(conv))
    columns = _by_group(errors, conv).transpose(0, 1, 3, 2)
    gradient = np.zeros((conv.groups, conv.out_channels // conv.groups, _fan_in(conv)), np.float32)
    for start in range(0, conv.images, span := max(1, _PRODUCTS_AT_ONCE // conv.weights)):
        gradient += (columns[start : start + span] @ rows[start : start + span]).sum(axis=0)
    return gradient.reshape(conv.out_channels, conv.channels // conv.groups, conv.kernel_h, conv.kernel_w)


def input_gradient(conv: Conv, weights: Floats, errors: Floats) -> Floats:
    """Errors in the order of the output; the result is (image, row, column, channel)."""
    rows = _by_group(errors, conv) @ weights.reshape(conv.groups, -1, _fan_in(conv))
    taps = conv.kernel_h * conv.kernel_w
    under = rows.reshape(conv.images, conv.groups, conv.pixels, conv.channels // conv.groups, taps)
    height, width = conv.height + 2 * conv.pad_h, conv.width + 2 * conv.pad_w
    padded = np.zeros((conv.images, height, width, conv.channels), np.float32)
    for tap, where in enumerate(_taps(conv)):
        padded[where] += under[..., tap].transpose(0, 2, 1, 3).reshape(padded[where].shape)
    return padded[:, conv.pad_h : height - conv.pad_h, conv.pad_w : width - conv.pad_w]


def widened(halves: Halves) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def halved(values: Floats) -> Halves:
    """`values` rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _taps(conv: Conv) -> Iterator[tuple[slice, slice, slice]]:
    """What of the padded images lies under each element of the kernel."""
    for row in range(conv.kernel_h):
        for column in range(conv.kernel_w):
            top, left = row * conv.dilation_h, column * conv.dilation_w
            rows = slice(top, top + (conv.out_height - 1) * conv.stride_h + 1, conv.stride_h)
            columns = slice(left, left + (conv.out_width - 1) * conv.stride_w + 1, conv.stride_w)
            yield slice(None), rows, columns


def _by_group(values: Floats, conv: Conv) -> Floats:
    """(image, group, pixel, channel of the group)"""
    return values.reshape(conv.images, conv.pixels, conv.groups, -1).transpose(0, 2, 1, 3)


def _fan_in(conv: Conv) -> int:
    return int(conv.channels // conv.groups * conv.kernel_h * conv.kernel_w)
