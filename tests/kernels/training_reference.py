"""What the training kernels compute, again: slowly, in NumPy.

Integers are int64; floats are added in the order that the kernels promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Conv, StoredCodes

Array = NDArray[Any]
WEIGHT_BITS = range(1, 9)


def widened(halves: Array) -> NDArray[np.float32]:
    """The float32 of a bfloat16."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def halved(real: Array) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(real, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def packed(stored: Array, pairs: bool) -> NDArray[np.uint8]:
    """`(images, ...)` bytes as the kernels keep them: as they are, or two a byte, low half first."""
    flat = stored.reshape(len(stored), -1).astype(np.uint8)
    if not pairs:
        return flat.reshape(-1).copy()
    even = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
    return (even[:, 0::2] | even[:, 1::2] << 4).astype(np.uint8).reshape(-1)


def unpacked(data: Array, images: int, count: int, pairs: bool) -> NDArray[np.uint8]:
    """`(images, count)` bytes."""
    rows = data.reshape(images, -1)
    if pairs:
        rows = np.stack([rows & 15, rows >> 4], axis=-1).reshape(images, -1)
    return rows[:, :count]


def output_size(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    return (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1


def windows(conv: Conv, padded: Array) -> Iterator[tuple[int, int, Array]]:
    """Each tap's row and column, and the view `(images, out_height, out_width, channels)` under it."""
    for r in range(conv.kernel_h):
        for s in range(conv.kernel_w):
            y, x = r * conv.dilation_h, s * conv.dilation_w
            rows = slice(y, y + (conv.out_height - 1) * conv.stride_h + 1, conv.stride_h)
            columns = slice(x, x + (conv.out_width - 1) * conv.stride_w + 1, conv.stride_w)
            yield r, s, padded[:, rows, columns]


def padded(conv: Conv, values: Array, fill: int = 0) -> Array:
    pads = ((0, 0), (conv.pad_h, conv.pad_h), (conv.pad_w, conv.pad_w), (0, 0))
    return np.pad(values, pads, constant_values=fill)


def group_weights(conv: Conv, weights: Array) -> Array:
    """`(out_channels, channels, row, column)` with zeros between groups."""
    inputs, outputs = conv.channels // conv.groups, conv.out_channels // conv.groups
    whole = np.zeros((conv.out_channels, conv.channels, conv.kernel_h, conv.kernel_w), np.int64)
    for g in range(conv.groups):
        rows = slice(g * outputs, (g + 1) * outputs)
        whole[rows, g * inputs : (g + 1) * inputs] = weights[rows]
    return whole


def conv_forward(conv: Conv, codes: Array, weights: Array) -> Array:
    whole = group_weights(conv, weights)
    acc = np.zeros((conv.images, conv.out_height, conv.out_width, conv.out_channels), np.int64)
    for r, s, window in windows(conv, padded(conv, codes.astype(np.int64))):
        acc += window @ whole[:, :, r, s].T
    return acc


def conv_backward_input(conv: Conv, errors: Array, weights: Array) -> Array:
    whole = group_weights(conv, weights)
    wide = padded(conv, np.zeros((conv.images, conv.height, conv.width, conv.channels), np.int64))
    for r, s, window in windows(conv, wide):
        window += errors.astype(np.int64) @ whole[:, :, r, s]
    return wide[:, conv.pad_h :, conv.pad_w :][:, : conv.height, : conv.width]


def conv_backward_weights(conv: Conv, codes: Array, errors: Array) -> Array:
    inputs, outputs = conv.channels // conv.groups, conv.out_channels // conv.groups
    sums = np.zeros((conv.out_channels, inputs, conv.kernel_h, conv.kernel_w), np.int64)
    for r, s, window in windows(conv, padded(conv, codes.astype(np.int64))):
        whole = np.einsum("nyxo,nyxi->oi", errors.astype(np.int64), window)
        for o in range(conv.out_channels):
            g = o // outputs
            sums[o, :, r, s] = whole[o, g * inputs : (g + 1) * inputs]
    return sums


@dataclass(frozen=True)
class Problem:
    """A convolution with its codes, weights and quantized errors."""

    conv: Conv
    stored: NDArray[np.uint8]  # bytes `code + zero`
    pairs: bool
    zero: int
    weights: NDArray[np.int8]
    errors: NDArray[np.int8]

    @property
    def codes(self) -> Array:
        return self.stored.astype(np.int64) - self.zero

    @property
    def stored_codes(self) -> StoredCodes:
        return StoredCodes(packed(self.stored, self.pairs), self.pairs, self.zero)


def problem(conv: Conv, pairs: bool, zero: int, weight_bits: int, seed: int, extremes: bool) -> Problem:
    """Random codes, weights of a `weight_bits` layer and errors; or each of them one of its two extremes."""
    rng = np.random.default_rng(seed)
    code, weight = 15 if pairs else 255, min(127, 2**weight_bits - 1)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Array:
        return rng.choice([low, high], shape[:1] + (1,) * (len(shape) - 1)) + np.zeros(shape, np.int64)

    pick = draw if extremes else (lambda low, high, shape: rng.integers(low, high + 1, shape))
    taps = (conv.out_channels, conv.channels // conv.groups, conv.kernel_h, conv.kernel_w)
    pixels = (conv.images, conv.height, conv.width, conv.channels)
    outputs = (conv.images, conv.out_height, conv.out_width, conv.out_channels)
    return Problem(
        conv=conv,
        stored=pick(0, code, pixels).astype(np.uint8),
        pairs=pairs,
        zero=zero,
        weights=pick(-weight, weight, taps).astype(np.int8),
        errors=pick(-127, 127, outputs).astype(np.int8),
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """Odd shapes of every kind: depthwise, groups, strides, dilation, padding beyond the kernel's reach."""
    kind = draw(st.sampled_from(["dense", "dense", "groups", "depthwise", "pointwise"]))
    groups = draw(st.integers(2, 3)) if kind == "groups" else 1
    inputs = draw(st.sampled_from([1, 3, 4, 7, 16, 18]))
    outputs = draw(st.sampled_from([1, 2, 8, 16, 17, 33]))
    if kind == "depthwise":
        groups, inputs, outputs = draw(st.sampled_from([1, 5, 8, 16, 19, 33])), 1, 1
    sides = [_side(draw, kind == "pointwise") for _ in range(2)]
    (height, kernel_h, stride_h, pad_h, dilation_h), (width, kernel_w, stride_w, pad_w, dilation_w) = sides
    return Conv(
        images=draw(st.integers(1, 3)),
        height=height,
        width=width,
        channels=groups * inputs,
        out_height=output_size(*sides[0]),
        out_width=output_size(*sides[1]),
        out_channels=groups * outputs,
        kernel_h=kernel_h,
        kernel_w=kernel_w,
        stride_h=stride_h,
        stride_w=stride_w,
        pad_h=pad_h,
        pad_w=pad_w,
        dilation_h=dilation_h,
        dilation_w=dilation_w,
        groups=groups,
    )


def _side(draw: st.DrawFn, pointwise: bool) -> tuple[int, int, int, int, int]:
    """(size, kernel, stride, padding, dilation) along one axis, with at least one output."""
    size, stride = draw(st.sampled_from([1, 2, 5, 9, 19])), draw(st.integers(1, 3))
    if pointwise:
        return size, 1, stride, 0, 1
    kernel, dilation, pad = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    needed = dilation * (kernel - 1) + 1 - 2 * pad
    return max(size, needed), kernel, stride, pad, dilation


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    pairs = draw(st.booleans())
    zero = draw(st.sampled_from([0, 0, 8] if pairs else [0, 73, 127, 128, 255]))
    bits, seed = draw(st.sampled_from(WEIGHT_BITS)), draw(st.integers(0, 2**32 - 1))
    return problem(draw(convolutions()), pairs, zero, bits, seed, draw(st.booleans()))
