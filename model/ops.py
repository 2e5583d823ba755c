"""The operations a graph is made of, and the one table that says what each of them reads and gives.

Shapes are those of one sample: `(C, H, W)` or `(F,)`. Along one axis a window of `kernel` elements gives
`floor((size + 2*padding - dilation*(kernel - 1) - 1) / stride) + 1` elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedmpq.model.op_checks import (
    MAX_DIMENSION,
    MAX_ELEMENTS,
    MAX_FAN_IN,
    GraphError,
    Shape,
    Size,
    check_elements,
    check_float32,
    check_range,
    check_size,
    image,
    slide,
)
from fedmpq.model.pointwise import FUNCTIONS
from fedmpq.model.pools import AdaptiveAvgPool, AvgPool, GlobalAvgPool, MaxPool, pooled_shape
from fedmpq.model.rearrangements import ChannelShuffle, Pad, Slice, Upsample, rearranged_shape

__all__ = [
    "MAX_DIMENSION",
    "MAX_ELEMENTS",
    "MAX_FAN_IN",
    "RULES",
    "AdaptiveAvgPool",
    "Add",
    "AvgPool",
    "BatchNorm",
    "ChannelShuffle",
    "Concat",
    "Conv2d",
    "Flatten",
    "GlobalAvgPool",
    "GraphError",
    "Kind",
    "Layer",
    "Linear",
    "MaxPool",
    "Op",
    "Pad",
    "Quantize",
    "Relu",
    "Rule",
    "Shape",
    "ShapeOp",
    "Size",
    "Slice",
    "Upsample",
    "check_elements",
    "check_float32",
    "check_range",
]

Kind = Literal["codes", "real"]

MAX_INPUTS = 256
"""Of a concatenation: more than the 65 of the longest block of a DenseNet, few enough for a call each."""


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
    """`weight * (x - mean) / sqrt(var + eps) + bias`, folded into the layer it reads.

    Behind anything but a layer that it reads alone, it reads codes, and is folded into an `identity_layer`.
    """

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
class Concat:
    """Images of equal height and width as one: the channels of the first, then of the second, and so on.

    Its codes have 8 bits, with a sign if one of its inputs has, and the widest range of them
    (`CodeFormat.joined`): no clip has to be learnt.
    """


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
ShapeOp = (
    Concat
    | MaxPool
    | AvgPool
    | GlobalAvgPool
    | AdaptiveAvgPool
    | Flatten
    | Slice
    | ChannelShuffle
    | Pad
    | Upsample
)
"""What gives other shapes of codes and has nothing to learn."""
Op = Conv2d | Linear | BatchNorm | Relu | Quantize | Add | Lookup | Mul | ShapeOp


def _conv2d(op: Conv2d, x: Shape) -> Shape:
    channels, height, width = image(x)
    check_range("in_channels", op.in_channels, 1, MAX_DIMENSION)
    check_range("out_channels", op.out_channels, 1, MAX_DIMENSION)
    check_range("groups", op.groups, 1, MAX_DIMENSION)
    check_size("kernel", op.kernel, 1)
    check_size("stride", op.stride, 1)
    check_size("padding", op.padding, 0)
    check_size("dilation", op.dilation, 1)
    if channels != op.in_channels:
        raise GraphError(f"in_channels is {op.in_channels}, but its input has {channels} channels")
    if op.in_channels % op.groups or op.out_channels % op.groups:
        raise GraphError(f"groups {op.groups} must divide {op.in_channels} and {op.out_channels} channels")
    check_elements("weight", op.weight_shape)
    check_range("fan-in", math.prod(op.weight_shape[1:]), 1, MAX_FAN_IN)
    axes = zip((height, width), op.kernel, op.stride, op.padding, op.dilation, strict=True)
    return (op.out_channels, *(slide(*axis) for axis in axes))


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


def _concat(op: Concat, *inputs: Shape) -> Shape:
    check_range("the number of inputs", len(inputs), 2, MAX_INPUTS)
    sizes = {image(each)[1:] for each in inputs}
    if len(sizes) > 1:
        raise GraphError(
            f"joins images of {' and '.join(map(str, sorted(sizes)))} pixels, which must be equal"
        )
    return (sum(each[0] for each in inputs), *sizes.pop())


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

    `arity`: how many inputs it has, None for any number that `shape` allows. `reads`: the kind its inputs
    must have in a graph ready to run, None for either. `gives`: the kind of its output, None for that of its
    input. `shape(op, *inputs)`: its output's shape; refuses a malformed op. `side(op)`: the side tensors it
    has, the last part of their names and their shapes.
    """

    arity: int | None
    reads: Kind | None
    gives: Kind | None
    shape: Callable[..., Shape]
    side: Callable[..., dict[str, Shape]] = _no_side_tensors


RULES: dict[type[Op], Rule] = {
    Conv2d: Rule(1, reads="codes", gives="real", shape=_conv2d, side=_bias),
    Linear: Rule(1, reads="codes", gives="real", shape=_linear, side=_bias),
    BatchNorm: Rule(1, reads=None, gives="real", shape=_batch_norm, side=_batch_norm_parts),
    Relu: Rule(1, reads=None, gives="real", shape=_relu),
    Quantize: Rule(1, reads="real", gives="codes", shape=_quantize, side=_clip),
    Add: Rule(2, reads="codes", gives="real", shape=_add),
    Concat: Rule(None, reads="codes", gives=None, shape=_concat),
    MaxPool: Rule(1, reads="codes", gives=None, shape=pooled_shape),
    AvgPool: Rule(1, reads="codes", gives=None, shape=pooled_shape),
    GlobalAvgPool: Rule(1, reads="codes", gives=None, shape=pooled_shape),
    AdaptiveAvgPool: Rule(1, reads="codes", gives=None, shape=pooled_shape),
    Flatten: Rule(1, reads="codes", gives=None, shape=_flatten),
    Lookup: Rule(1, reads="codes", gives="real", shape=_lookup),
    Mul: Rule(2, reads="codes", gives="real", shape=_mul),
    Slice: Rule(1, reads="codes", gives=None, shape=rearranged_shape),
    ChannelShuffle: Rule(1, reads="codes", gives=None, shape=rearranged_shape),
    Pad: Rule(1, reads="codes", gives=None, shape=rearranged_shape),
    Upsample: Rule(1, reads="codes", gives=None, shape=rearranged_shape),
}
