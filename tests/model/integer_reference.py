"""The slow reference of the integer eval forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Op,
    Pad,
    Quantize,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.integer_forward import logits, trace_values
from fedmpq.model.integer_program import IntegerProgram, compile_program
from fedmpq.model.pools import PoolOp
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from tests.functions import SLOW

F = np.float32
Integers = NDArray[np.int64]


# The slow reference: one image, channels first, whole numbers in Python or int64, each formula of
# docs/algorithm.md on float32 scalars. It reads the graph itself and nothing of the program under test.


@dataclass
class Codes:
    values: Integers
    scale: np.float32
    low: int
    high: int


@dataclass
class Real:
    values: NDArray[np.float32]


@dataclass
class Function:
    """A function of codes, in double precision until it is rounded; `bound` is its greatest magnitude."""

    values: NDArray[np.float64]
    bound: float


@dataclass
class Product:
    """Products of two codes, each worth `scale`."""

    values: Integers
    scale: np.float32


@dataclass
class Sums:
    """Sums of products, with `s_x`, and per channel `s_w` and `B`, into which BatchNorm folds."""

    values: Integers
    input_scale: np.float32
    longest: int
    scales: list[np.float32]
    offsets: list[np.float32]


@dataclass
class Positive:
    value: Codes | Real | Function | Product | Sums
    maximum: float


Value = Codes | Real | Function | Product | Sums | Positive


def clamped(real: np.float32, low: int, high: int) -> int:
    assert isinstance(real, np.float32)
    # Python rounds half to even, and float64 holds every float32.
    return min(max(round(float(real)), low), high)


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def slow_conv(x: Integers, weight: Integers, op: Conv2d) -> Integers:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = op.kernel, op.stride, op.padding, op.dilation
    height = output_size(x.shape[1], kh, sh, ph, dh)
    width = output_size(x.shape[2], kw, sw, pw, dw)
    inputs, outputs = op.in_channels // op.groups, op.out_channels // op.groups
    out = np.zeros((op.out_channels, height, width), np.int64)
    for c in range(op.out_channels):
        block = x[c // outputs * inputs :][:inputs]
        for i in range(height):
            for j in range(width):
                for u in range(kh):
                    for v in range(kw):
                        y, z = i * sh - ph + u * dh, j * sw - pw + v * dw
                        if 0 <= y < x.shape[1] and 0 <= z < x.shape[2]:
                            out[c, i, j] += int((block[:, y, z] * weight[c, :, u, v]).sum())
    return out


def spans(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> list[tuple[int, int]]:
    """First element and one past the last of each of torch's windows along an axis, padding included."""
    found, start = [], -padding
    while start + kernel <= size + padding or (ceil and start < size):
        found.append((start, min(start + kernel, size + padding)))
        start += stride
        if ceil and found[-1][1] == size + padding:
            break
    return found


def pool_spans(x: Integers, op: PoolOp) -> tuple[list[tuple[int, int]], ...]:
    if isinstance(op, GlobalAvgPool):
        return [(0, x.shape[1])], [(0, x.shape[2])]
    if isinstance(op, AdaptiveAvgPool):
        sides = zip(x.shape[1:], op.size, strict=True)
        return tuple([(i * n // m, ((i + 1) * n + m - 1) // m) for i in range(m)] for n, m in sides)
    windows = zip(x.shape[1:], op.kernel, op.stride, op.padding, strict=True)
    return tuple(spans(*each, op.ceil_mode) for each in windows)


def windows(x: Integers, op: PoolOp) -> list[list[list[tuple[list[int], int]]]]:
    """The codes under each window, without the padding, and what a mean divides by."""
    rows, columns = pool_spans(x, op)
    inside_only = isinstance(op, AvgPool) and op.exclude_padding
    found: list[list[list[tuple[list[int], int]]]] = []
    for channel in x:
        found.append([])
        for top, bottom in rows:
            found[-1].append([])
            for left, right in columns:
                under = channel[max(top, 0) : bottom, max(left, 0) : right].reshape(-1).tolist()
                size = len(under) if inside_only else (bottom - top) * (right - left)
                found[-1][-1].append((under, size))
    return found


def joined(inputs: list[Codes]) -> Codes:
    """All in 8 bits of the widest range."""
    high = 127 if any(x.low < 0 for x in inputs) else 255
    scale = F(max(F(x.scale * F(x.high)) for x in inputs) / F(high))
    low = -127 if high == 127 else 0
    codes = [
        [clamped(F(int(code)) * F(x.scale / scale), low, high) for code in x.values.reshape(-1)]
        for x in inputs
    ]
    parts = [np.array(c, np.int64).reshape(x.values.shape) for c, x in zip(codes, inputs, strict=True)]
    return Codes(np.concatenate(parts), scale, low, high)


def moved(x: Integers, op: Op) -> Integers:
    channels, height, width = x.shape
    if isinstance(op, Slice):
        return np.stack([x[c] for c in range(op.start, op.stop)])
    if isinstance(op, ChannelShuffle):
        run = channels // op.groups
        return np.stack([x[group * run + place] for place in range(run) for group in range(op.groups)])
    if isinstance(op, Pad):
        out = np.zeros(
            (channels, height + op.before[0] + op.after[0], width + op.before[1] + op.after[1]), np.int64
        )
        out[:, op.before[0] :, op.before[1] :][:, :height, :width] = x
        return out
    assert isinstance(op, Upsample)
    out = np.zeros((channels, height * op.factor[0], width * op.factor[1]), np.int64)
    for c, i, j in np.ndindex(out.shape):
        out[c, i, j] = x[c, i // op.factor[0], j // op.factor[1]]
    return out


def integer_weight(layer: QuantizedLayer) -> tuple[Integers, list[np.float32]]:
    """`2c - (2^b - 1)` with scale `step/2`; at 8 bits `c - 128` with scale `step`."""
    codes = layer.codes.astype(np.int64)
    steps = [F(step) for step in np.broadcast_to(layer.step, (len(codes),))]
    if layer.bits == 8:
        return codes - 128, steps
    return 2 * codes - (2**layer.bits - 1), [step / F(2) for step in steps]


def kept_scale(scale: np.float32, offset: np.float32, longest: int) -> np.float32:
    """`s_x * s_w`, unless `bias_int` would then be too large for an int32 that must hold the sums as well."""
    limit = F(2**30) if longest < 2**30 else F(2**24)
    least = max(abs(offset) / limit, F(2.0**-80))
    return F(np.copysign(least, scale)) if abs(scale) < least else scale


def requantized(value: Sums, s_y: np.float32, low: int, high: int) -> Integers:
    out = np.zeros_like(value.values)
    for c, (s_w, offset) in enumerate(zip(value.scales, value.offsets, strict=True)):
        scale = kept_scale(value.input_scale * s_w, offset, value.longest)
        bias = round(float(offset / scale))
        multiplier = scale / s_y
        for place, acc in np.ndenumerate(value.values[c]):
            out[(c, *place)] = clamped(F(int(acc) + bias) * multiplier, low, high)
    return out


def quantized(value: Value, op: Quantize, clip: np.float32) -> Codes:
    clip = max(F(clip), F(2.0**-10))
    if isinstance(value, Positive):
        clip = min(clip, F(value.maximum)) if value.maximum else clip
        value = value.value
    elif isinstance(value, Function) and value.bound:
        clip = min(clip, F(value.bound))
    high = 2 ** (op.bits - 1) - 1 if op.signed else 2**op.bits - 1
    low = -high if op.signed else 0
    s_y = F(clip / F(high))
    if isinstance(value, Sums):
        return Codes(requantized(value, s_y, low, high), s_y, low, high)
    out = np.zeros(value.values.shape, np.int64)
    for place, element in np.ndenumerate(value.values):
        if isinstance(value, Codes | Product):
            out[place] = clamped(F(int(element)) * F(value.scale / s_y), low, high)
        elif isinstance(value, Function):
            out[place] = min(max(round(float(element) / float(s_y)), low), high)
        else:
            out[place] = clamped(F(element) / s_y, low, high)
    return Codes(out, s_y, low, high)


def averaged(value: Codes, op: AvgPool | GlobalAvgPool | AdaptiveAvgPool) -> Codes:
    """Sums over the window times `s / (s' * window)`, where `s' = s * high / high'` and codes have 8 bits."""
    high = 127 if value.low < 0 else 255
    low = -127 if value.low < 0 else 0
    scale = F(value.scale * F(value.high) / F(high))
    pooled = [
        [
            [clamped(F(sum(codes)) * F(value.scale / (scale * F(size))), low, high) for codes, size in row]
            for row in channel
        ]
        for channel in windows(value.values, op)
    ]
    return Codes(np.array(pooled, np.int64), scale, low, high)


def shaped(op: Op, inputs: list[Codes]) -> Codes:
    """What pools, joins or moves codes."""
    x = inputs[0]
    if isinstance(op, Flatten):
        return replace(x, values=x.values.reshape(-1))
    if isinstance(op, MaxPool):
        pooled = [[[max(c) for c, _ in row] for row in channel] for channel in windows(x.values, op)]
        return replace(x, values=np.array(pooled, np.int64))
    if isinstance(op, Concat):
        return joined(inputs)
    if isinstance(op, AvgPool | GlobalAvgPool | AdaptiveAvgPool):
        return averaged(x, op)
    return replace(x, values=moved(x.values, op))


class Reference:
    def __init__(self, graph: Graph, layers: Layers, side: Side, image: NDArray[np.uint8]) -> None:
        self.layers, self.side = layers, side
        codes = image.astype(np.int64).transpose(2, 0, 1) - graph.input.zero_point
        zero = graph.input.zero_point
        self.values: dict[str, Value] = {INPUT: Codes(codes, F(graph.input.scale), -zero, 255 - zero)}
        for node in graph.nodes:
            self.values[node.name] = self.apply(node, [self.values[name] for name in node.inputs])
        self.logits = self.real(self.values[graph.output])

    def apply(self, node: Node, inputs: list[Value]) -> Value:
        op, x = node.op, inputs[0]
        if isinstance(op, BatchNorm):
            return self.folded(node.name, op, x)
        if isinstance(op, Relu):
            assert not isinstance(x, Positive)
            return Positive(x, op.maximum)
        if isinstance(op, Quantize):
            return quantized(x, op, F(self.side[f"{node.name}.clip"]))
        assert isinstance(x, Codes)
        if isinstance(op, Conv2d | Linear):
            return self.product(node.name, op, x)
        if isinstance(op, Add):
            y = inputs[1]
            assert isinstance(y, Codes)
            return Real(x.values.astype(F) * x.scale + y.values.astype(F) * y.scale)
        if isinstance(op, Mul):
            y = inputs[1]
            assert isinstance(y, Codes)
            return Product(x.values * y.values, F(x.scale * y.scale))
        if isinstance(op, Lookup):
            reals = [SLOW[op.function](int(a) * float(x.scale), op.parameter) for a in x.values.reshape(-1)]
            bound = 1.0 if op.function in ("sigmoid", "hardsigmoid", "tanh") else 0.0
            return Function(np.array(reals).reshape(x.values.shape), bound)
        return shaped(op, [each for each in inputs if isinstance(each, Codes)])

    def product(self, name: str, op: Conv2d | Linear, x: Codes) -> Sums:
        weight, scales = integer_weight(self.layers[name])
        sums = slow_conv(x.values, weight, op) if isinstance(op, Conv2d) else weight @ x.values
        bias = self.side[f"{name}.bias"] if op.bias else np.zeros(len(weight), F)
        longest = weight[0].size * max(-x.low, x.high) * 127
        return Sums(sums, x.scale, longest, scales, [F(b) for b in bias])

    def folded(self, name: str, op: BatchNorm, x: Value) -> Sums:
        if isinstance(x, Codes):
            # Each channel by itself, times 63, and a 63rd of the scale for that.
            unit, none = F(F(2 / 63) / F(2)), [F(0)] * op.channels
            x = Sums(63 * x.values, x.scale, 63 * 255, [unit] * op.channels, none)
        assert isinstance(x, Sums)
        gamma, beta, mean, var = (
            self.side[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        factors = [F(g / np.sqrt(F(v + F(op.eps)))) for g, v in zip(gamma, var, strict=True)]
        return replace(
            x,
            scales=[s * f for s, f in zip(x.scales, factors, strict=True)],
            offsets=[b + (o - m) * f for b, o, m, f in zip(beta, x.offsets, mean, factors, strict=True)],
        )

    def real(self, value: Value) -> NDArray[np.float32]:
        if isinstance(value, Real):
            return value.values
        if isinstance(value, Codes):
            return value.values.astype(F) * value.scale
        assert isinstance(value, Sums)
        out = []
        for acc, s_w, offset in zip(value.values.tolist(), value.scales, value.offsets, strict=True):
            scale = kept_scale(value.input_scale * s_w, offset, value.longest)
            out.append(F(acc + round(float(offset / scale))) * scale)
        return np.array(out, F)


@dataclass
class Model:
    graph: Graph
    layers: Layers
    side: Side

    def program(self) -> IntegerProgram:
        return compile_program(self.graph, self.layers, self.side)


def check_against_reference(model: Model, images: NDArray[np.uint8]) -> None:
    """Every tensor of codes of every image, and the logits, to the bit."""
    program = model.program()
    traced = trace_values(program, images)
    assert set(program.formats) <= set(traced)
    for index, image in enumerate(images):
        reference = Reference(model.graph, model.layers, model.side, image)
        for name, form in program.formats.items():
            value = reference.values[name]
            assert isinstance(value, Codes)
            assert (form.scale, form.low, form.high) == (value.scale, value.low, value.high), name
            got = traced[name][index]
            got = got.transpose(2, 0, 1) if got.ndim == 3 else got
            np.testing.assert_array_equal(got, value.values, err_msg=name)
        np.testing.assert_array_equal(traced[program.output][index], reference.logits)
    np.testing.assert_array_equal(logits(program, images), traced[program.output])
