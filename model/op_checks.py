"""What every operation's check is made of: limits, errors that name what is wrong, and how windows slide."""

from __future__ import annotations

import math

import numpy as np

Shape = tuple[int, ...]
Size = tuple[int, int]

MAX_DIMENSION = 65536
MAX_ELEMENTS = 2**28
# Products of an 8-bit code and an 8-bit weight are at most 255 * 127: this many of them fit an int32 sum.
MAX_FAN_IN = 65536


class GraphError(ValueError):
    """A graph that is not well formed, or bytes that are none."""


def check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise GraphError(f"{what} is {value}, must be within {low}..{high}")


def check_float32(what: str, value: float, *, zero_allowed: bool) -> None:
    """Refuses what the wire's 32-bit field would change, and what is negative, infinite or not a number."""
    if zero_allowed and value == 0 and math.copysign(1, value) > 0:
        return
    if not 0 < value <= float(np.finfo(np.float32).max) or float(np.float32(value)) != value:
        raise GraphError(f"{what} is {value!r}, must be a positive float32: round it with numpy.float32")


def check_elements(what: str, shape: Shape) -> None:
    """Bounds a tensor before anyone allocates it."""
    for dimension in shape:
        check_range(f"a dimension of the {what} {shape}", dimension, 1, MAX_DIMENSION)
    if math.prod(shape) > MAX_ELEMENTS:
        raise GraphError(f"the {what} {shape} has {math.prod(shape)} elements, at most {MAX_ELEMENTS} may be")


def check_size(what: str, size: Size, low: int) -> None:
    for axis, value in zip(("height", "width"), size, strict=True):
        check_range(f"{what} {axis}", value, low, MAX_DIMENSION)


def image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise GraphError(f"reads shape {shape}, needs an image (channels, height, width)")
    return shape[0], shape[1], shape[2]


def slide(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    extent = dilation * (kernel - 1) + 1
    if extent > size + 2 * padding:
        raise GraphError(
            f"a window of {extent} does not fit {size} elements padded by {padding} on each side:"
            " use a smaller kernel, a larger image or more padding"
        )
    return (size + 2 * padding - extent) // stride + 1
