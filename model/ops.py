"""The operations a graph is made of, and the one table that says what each of them reads and gives.

Shapes are those of one sample: `(C, H, W)` or `(F,)`. Along one axis a window of `kernel` elements gives
`floor((size + 2*padding - dilation*(kernel - 1) - 1) / stride) + 1` elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmpq.model.pointwise import FUNCTIONS

Shape = tuple[int, ...]
Size = tuple[int, int]
Kind = Literal["codes", "real"]

MAX_DIMENSION = 65536
MAX_ELEMENTS = 2**28
# Products of an 8-bit code and an 8-bit weight are at most 255 * 127: this many of them fit an int32 sum.
MAX_FAN_IN = 65536


class GraphError(ValueError):
    """A graph that is not well formed, or bytes that are none."""


@dataclass(frozen=True)
class Conv2d:
    """Two-dimensional convolution; its weight is quantized."""

    in_channels: int
    out_channels: int
    kernel: Size
    stride: Size
    padding: Size
    dilation: Size
    groups: int
    bias: bool

    @property
    def weight_shape(self) -> Shape:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)


@dataclass(frozen=True)
class Linear:
    """Matrix product; its weight is quantized."""

    in_features: int
    out_features: int
    bias: bool

    @property
    def weight_shape(self) -> Shape:
        return (self.out_features, self.in_features)


@dataclass(frozen=True)
class BatchNorm:
    """`weight * (x - mean) / sqrt(var + eps) + bias`, folded into the layer it reads."""

    channels: int
    eps: float
    momentum: float


@dataclass(frozen=True)
class Relu:
    """`max(x, 0)`; if `maximum` is above 0, `min` of that and `maximum`."""

    maximum: float


@dataclass(frozen=True)
class Quantize:
    """Real values to codes of `bits` bits with a learnt clip, the side tensor `<node>.clip`."""

    bits: int
    signed: bool


@dataclass(frozen=True)
class Add:
    """Sum of two values of equal shape."""


@dataclass(frozen=True)
class MaxPool:
    """Greatest value under each window; padding never wins."""

    kernel: Size
    stride: Size
    padding: Size


@dataclass(frozen=True)
class AvgPool:
    """Sum of the elements under each window over the window's size: padding counts as zeros."""

    kernel: Size
    stride: Size
    padding: Size


@dataclass(frozen=True)
class GlobalAvgPool:
    """Mean over rows and columns, `(C, H, W)` to `(C, 1, 1)`."""


@dataclass(frozen=True)
class Flatten:
    """All elements in one row, channel by channel."""


@dataclass(frozen=True)
class Lookup:
    """A function of each value, by a table over codes: one of `pointwise.FUNCTIONS`."""

    function: str
    parameter: float
    """Of a leaky ReLU the slope below zero, of an ELU its alpha, of every other function 0."""


@dataclass(frozen=True)
class Mul:
    """Product of two values of equal shape, or of an image with one number for each of its channels."""


Layer = Conv2d | Linear
Pool = MaxPool | AvgPool | GlobalAvgPool
Op = Conv2d | Linear | BatchNorm | Relu | Quantize | Add | Pool | Flatten | Lookup | Mul


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


def _check_size(what: str, size: Size, low: int) -> None:
    for axis, value in zip(("height", "width"), size, strict=True):
        check_range(f"{what} {axis}", value, low, MAX_DIMENSION)


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise GraphError(f"reads shape {shape}, needs an image (channels, height, width)")
    return shape[0], shape[1], shape[2]


def _slide(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    extent = dilation * (kernel - 1) + 1
    if extent > size + 2 * padding:
        raise GraphError(
            f"a window of {extent} does not fit {size} elements padded by {padding} on each side:"
            " use a smaller kernel, a larger image or more padding"
        )
    return (size + 2 * padding - extent) // stride + 1


def _conv2d(op: Conv2d, x: Shape) -> Shape:
    channels, height, width = _image(x)
    check_range("in_channels", op.in_channels, 1, MAX_DIMENSION)
    check_range("out_channels", op.out_channels, 1, MAX_DIMENSION)
    check_range("groups", op.groups, 1, MAX_DIMENSION)
    _check_size("kernel", op.kernel, 1)
    _check_size("stride", op.stride, 1)
    _check_size("padding", op.padding, 0)
    _check_size("dilation", op.dilation, 1)
    if channels != op.in_channels:
        raise GraphError(f"in_channels is {op.in_channels}, but its input has {channels} channels")
    if op.in_channels % op.groups or op.out_channels % op.groups:
        raise GraphError(f"groups {op.groups} must divide {op.in_channels} and {op.out_channels} channels")
    check_elements("weight", op.weight_shape)
    check_range("fan-in", math.prod(op.weight_shape[1:]), 1, MAX_FAN_IN)
    axes = zip((height, width), op.kernel, op.stride, op.padding, op.dilation, strict=True)
    return (op.out_channels, *(_slide(*axis) for axis in axes))


def _linear(op: Linear, x: Shape) -> Shape:
    check_range("in_features", op.in_features, 1, MAX_FAN_IN)
    check_range("out_features", op.out_features, 1, MAX_DIMENSION)
    if x != (op.in_features,):
        raise GraphError(f"reads shape {x}, needs ({op.in_features},): flatten first, or change in_features")
    check_elements("weight", op.weight_shape)
    return (op.out_features,)


def _batch_norm(op: BatchNorm, x: Shape) -> Shape:
    check_range("channels", op.channels, 1, MAX_DIMENSION)
    if x[0] != op.channels:
        raise GraphError(f"channels is {op.channels}, but its input has {x[0]}")
    if not 0 < op.eps <= 1:
        raise GraphError(f"eps is {op.eps!r}, must be above 0 and at most 1")
    if not 0 <= op.momentum <= 1 or math.copysign(1, op.momentum) < 0:
        raise GraphError(f"momentum is {op.momentum!r}, must be within 0..1")
    return x


def _relu(op: Relu, x: Shape) -> Shape:
    check_float32("maximum", op.maximum, zero_allowed=True)
    return x


def _quantize(op: Quantize, x: Shape) -> Shape:
    # One bit holds a sign or a value, not both.
    check_range("bits", op.bits, 2 if op.signed else 1, 8)
    return x


def _add(op: Add, x: Shape, y: Shape) -> Shape:
    if x != y:
        raise GraphError(f"adds shapes {x} and {y}, which must be equal")
    return x


def _pool(op: MaxPool | AvgPool, x: Shape) -> Shape:
    channels, height, width = _image(x)
    _check_size("kernel", op.kernel, 1)
    _check_size("stride", op.stride, 1)
    for kernel, padding in zip(op.kernel, op.padding, strict=True):
        check_range(f"padding of a kernel of {kernel}", padding, 0, kernel // 2)
    axes = zip((height, width), op.kernel, op.stride, op.padding, strict=True)
    return (channels, *(_slide(*axis, dilation=1) for axis in axes))


def _global_avg_pool(op: GlobalAvgPool, x: Shape) -> Shape:
    return (_image(x)[0], 1, 1)


def _flatten(op: Flatten, x: Shape) -> Shape:
    return (math.prod(x),)


def _lookup(op: Lookup, x: Shape) -> Shape:
    if op.function not in FUNCTIONS:
        raise GraphError(f"the function {op.function[:40]!r} is not known: take {', '.join(FUNCTIONS)}")
    if FUNCTIONS[op.function].parameter is not None:
        check_float32(f"the {FUNCTIONS[op.function].parameter}", op.parameter, zero_allowed=True)
    elif op.parameter != 0 or math.copysign(1, op.parameter) < 0:
        raise GraphError(f"the parameter is {op.parameter!r}, but {op.function} has none: leave it 0")
    return x


def _mul(op: Mul, x: Shape, y: Shape) -> Shape:
    if y != x and not (len(x) == 3 and y == (x[0], 1, 1)):
        raise GraphError(
            f"multiplies shapes {x} and {y}; the second must be equal or one pixel of as many channels"
        )
    return x


def _no_side_tensors(op: Op) -> dict[str, Shape]:
    return {}


def _bias(op: Layer) -> dict[str, Shape]:
    return {"bias": op.weight_shape[:1]} if op.bias else {}


def _batch_norm_parts(op: BatchNorm) -> dict[str, Shape]:
    return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (op.channels,))


def _clip(op: Quantize) -> dict[str, Shape]:
    return {"clip": ()}


@dataclass(frozen=True)
class Rule:
    """What one operation reads and gives.

    `reads`: the kind its inputs must have in a graph ready to run, None for either. `gives`: the kind of its
    output, None for that of its input. `shape(op, *inputs)`: its output's shape; refuses a malformed op.
    `side(op)`: the side tensors it has, the last part of their names and their shapes.
    """

    arity: int
    reads: Kind | None
    gives: Kind | None
    shape: Callable[..., Shape]
    side: Callable[..., dict[str, Shape]] = _no_side_tensors


RULES: dict[type[Op], Rule] = {
    Conv2d: Rule(1, reads="codes", gives="real", shape=_conv2d, side=_bias),
    Linear: Rule(1, reads="codes", gives="real", shape=_linear, side=_bias),
    BatchNorm: Rule(1, reads="real", gives="real", shape=_batch_norm, side=_batch_norm_parts),
    Relu: Rule(1, reads=None, gives="real", shape=_relu),
    Quantize: Rule(1, reads="real", gives="codes", shape=_quantize, side=_clip),
    Add: Rule(2, reads="codes", gives="real", shape=_add),
    MaxPool: Rule(1, reads="codes", gives=None, shape=_pool),
    AvgPool: Rule(1, reads="codes", gives=None, shape=_pool),
    GlobalAvgPool: Rule(1, reads="codes", gives=None, shape=_global_avg_pool),
    Flatten: Rule(1, reads="codes", gives=None, shape=_flatten),
    Lookup: Rule(1, reads="codes", gives="real", shape=_lookup),
    Mul: Rule(2, reads="codes", gives="real", shape=_mul),
}
