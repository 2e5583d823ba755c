"""The integer eval forward against a slow reference, and against the float model it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.model import integer_forward
from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Input,
    Linear,
    MaxPool,
    Node,
    Op,
    Quantize,
    Relu,
)
from fedmpq.model.integer_forward import logits, numpy_products, trace_values
from fedmpq.model.integer_program import IntegerProgram, compile_program
from fedmpq.model.ops import RULES, Size
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, dequantize_all
from fedmpq.model.quantizers import place_quantizers

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
class Sums:
    """Sums of products, with `s_x`, and per channel `s_w` and `B`, into which BatchNorm folds."""

    values: Integers
    input_scale: np.float32
    longest: int
    scales: list[np.float32]
    offsets: list[np.float32]


@dataclass
class Positive:
    value: Codes | Real | Sums
    maximum: float


Value = Codes | Real | Sums | Positive


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


def windows(x: Integers, op: MaxPool | AvgPool) -> list[list[list[list[int]]]]:
    """The codes under each window, without the padding."""
    (kh, kw), (sh, sw), (ph, pw) = op.kernel, op.stride, op.padding
    height, width = output_size(x.shape[1], kh, sh, ph), output_size(x.shape[2], kw, sw, pw)
    return [
        [
            [
                channel[max(i * sh - ph, 0) : i * sh - ph + kh, max(j * sw - pw, 0) : j * sw - pw + kw]
                .reshape(-1)
                .tolist()
                for j in range(width)
            ]
            for i in range(height)
        ]
        for channel in x
    ]


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
    high = 2 ** (op.bits - 1) - 1 if op.signed else 2**op.bits - 1
    low = -high if op.signed else 0
    s_y = F(clip / F(high))
    if isinstance(value, Sums):
        return Codes(requantized(value, s_y, low, high), s_y, low, high)
    out = np.zeros(value.values.shape, np.int64)
    for place, element in np.ndenumerate(value.values):
        if isinstance(value, Codes):
            out[place] = clamped(F(int(element)) * F(value.scale / s_y), low, high)
        else:
            out[place] = clamped(F(element) / s_y, low, high)
    return Codes(out, s_y, low, high)


def averaged(value: Codes, op: AvgPool | GlobalAvgPool) -> Codes:
    """Sums over the window times `s / (s' * window)`, where `s' = s * high / high'` and codes have 8 bits."""
    if isinstance(op, GlobalAvgPool):
        size = (value.values.shape[1], value.values.shape[2])
        op = AvgPool(size, (1, 1), (0, 0))
    high = 127 if value.low < 0 else 255
    low = -127 if value.low < 0 else 0
    scale = F(value.scale * F(value.high) / F(high))
    multiplier = F(value.scale / (scale * F(op.kernel[0] * op.kernel[1])))
    pooled = [
        [[clamped(F(sum(codes)) * multiplier, low, high) for codes in row] for row in channel]
        for channel in windows(value.values, op)
    ]
    return Codes(np.array(pooled, np.int64), scale, low, high)


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
        if isinstance(op, Flatten):
            return replace(x, values=x.values.reshape(-1))
        if isinstance(op, MaxPool):
            pooled = [[[max(codes) for codes in row] for row in channel] for channel in windows(x.values, op)]
            return replace(x, values=np.array(pooled, np.int64))
        return averaged(x, op)

    def product(self, name: str, op: Conv2d | Linear, x: Codes) -> Sums:
        weight, scales = integer_weight(self.layers[name])
        sums = slow_conv(x.values, weight, op) if isinstance(op, Conv2d) else weight @ x.values
        bias = self.side[f"{name}.bias"] if op.bias else np.zeros(len(weight), F)
        longest = weight[0].size * max(-x.low, x.high) * 127
        return Sums(sums, x.scale, longest, scales, [F(b) for b in bias])

    def folded(self, name: str, op: BatchNorm, x: Value) -> Sums:
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


# Small graphs with a random state.


class Builder:
    """Grows a graph node by node; `last` is the newest value."""

    def __init__(self, channels: int = 2, height: int = 7, width: int = 6, zero_point: int = 33) -> None:
        self.image = Input(channels, height, width, float(F(0.02)), zero_point)
        self.nodes: list[Node] = []
        self.shapes = {INPUT: self.image.shape}
        self.last = INPUT

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[self.last]

    def add(self, op: Op, *inputs: str) -> str:
        inputs = inputs or (self.last,)
        self.last = f"n{len(self.nodes)}"
        self.nodes.append(Node(self.last, op, inputs))
        self.shapes[self.last] = RULES[type(op)].shape(op, *(self.shapes[name] for name in inputs))
        return self.last

    def conv(
        self, channels: int, size: Size = (3, 3), *, norm: bool = True, bias: bool = False, **more: Any
    ) -> str:
        """A convolution, and a BatchNorm on it."""
        settings: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        settings |= more
        self.add(Conv2d(self.shape[0], channels, size, bias=bias, **settings))
        return self.add(BatchNorm(channels, 1e-5, 0.1)) if norm else self.last

    def residual(self, *, projected: bool = False, relu: bool = True) -> None:
        """`relu(norm(conv(relu(norm(conv(x))))) + x)`, or with `norm(conv(x))` for the last `x`."""
        source, channels = self.last, self.shape[0]
        self.conv(channels)
        self.add(Relu(0.0))
        branch = self.conv(channels)
        if projected:
            self.last = source
            source = self.conv(channels, (1, 1), padding=(0, 0))
        self.add(Add(), branch, source)
        if relu:
            self.add(Relu(0.0))

    def head(self, *, mean: bool = True, bias: bool = True, hidden: int = 0) -> None:
        if mean:
            self.add(GlobalAvgPool())
        self.add(Flatten())
        if hidden:
            self.add(Linear(self.shape[0], hidden, bias))
            self.add(BatchNorm(hidden, 1e-3, 0.1))
            self.add(Relu(6.0))
        self.add(Linear(self.shape[0], 3, bias))

    def graph(self, activation_bits: int = 4) -> Graph:
        return place_quantizers(Graph("net", self.image, tuple(self.nodes), self.last), activation_bits)


def real_values(value: Value) -> NDArray[np.float64]:
    if isinstance(value, Positive):
        return np.asarray(np.maximum(real_values(value.value), 0), np.float64)
    if isinstance(value, Real):
        return value.values.astype(np.float64)
    if isinstance(value, Codes):
        return np.asarray(value.values * float(value.scale), np.float64)
    by_channel = [-1, *[1] * (value.values.ndim - 1)]
    scales = np.array(value.scales, np.float64).reshape(by_channel) * float(value.input_scale)
    return value.values * scales + np.array(value.offsets, np.float64).reshape(by_channel)


class Calibration(Reference):
    """Fits statistics and clips to an image, so that its signal reaches the end.

    Some gammas are below zero. If `odd`, some are zero or next to it, some variances are zero, some clips
    too small.
    """

    def __init__(
        self, graph: Graph, layers: Layers, random: np.random.Generator, image: NDArray[np.uint8], odd: bool
    ) -> None:
        self.random, self.odds = random, 0.07 if odd else 0.0
        biases = {name: shape for name, shape in graph.side_shapes().items() if name.endswith(".bias")}
        side = {name: self.normal(shape) for name, shape in biases.items()}
        super().__init__(graph, layers, side, image)

    def normal(self, shape: tuple[int, ...], centre: float = 0.0) -> NDArray[np.float32]:
        return (centre + 0.4 * self.random.standard_normal(shape)).astype(np.float32)

    def mixed(self, usual: NDArray[np.float64], *oddities: float) -> NDArray[np.float32]:
        odd = self.random.random(usual.shape) < self.odds
        return np.where(odd, self.random.choice(oddities, usual.shape), usual).astype(np.float32)

    def apply(self, node: Node, inputs: list[Value]) -> Value:
        if isinstance(node.op, BatchNorm):
            flat = real_values(inputs[0]).reshape(node.op.channels, -1)
            mean = flat.mean(axis=1) if flat.shape[1] > 1 else np.zeros(len(flat))
            deviation = np.maximum(flat.std(axis=1), 0.1 * np.abs(flat).max() + 0.1)
            gamma = self.normal(mean.shape, 1.0) * self.random.choice([-1, 1], mean.shape)
            self.side |= {
                f"{node.name}.weight": self.mixed(gamma, 0.0, 1e-9, -1e-9),
                f"{node.name}.running_mean": (mean + 0.2 * deviation).astype(np.float32),
                f"{node.name}.running_var": self.mixed(np.square(deviation), 0.0),
            }
        elif isinstance(node.op, Quantize):
            largest = np.asarray(np.abs(real_values(inputs[0])).max() + 0.01)
            clip = self.mixed(largest * self.random.uniform(0.4, 1.2), 0.0001)
            self.side[f"{node.name}.clip"] = clip
        return super().apply(node, inputs)


def random_model(
    graph: Graph,
    seed: int,
    bits: tuple[int, ...] | None = None,
    per_channel: bool | None = None,
    odd: bool = True,
) -> Model:
    """Mixed bit-widths and kinds of steps, unless they are given."""
    random = np.random.default_rng(seed)
    layers: Layers = {}
    for index, node in enumerate(graph.layers):
        width = int(random.integers(1, 9)) if bits is None else bits[index % len(bits)]
        channels = bool(random.integers(2)) if per_channel is None else per_channel
        weights = random.standard_t(3, graph.weight_shape(node.name)).astype(np.float32)
        layers[node.name] = QuantizedLayer.from_weights(weights, width, "least_error", channels)
    image = random_images(graph, 1, seed)[0]
    return Model(graph, layers, Calibration(graph, layers, random, image, odd).side)


def random_images(graph: Graph, count: int, seed: int = 0) -> NDArray[np.uint8]:
    image = graph.input
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, image.height, image.width, image.channels), dtype=np.uint8)
    images.reshape(-1)[:2] = 0, 255
    return images


def plain(net: Builder) -> None:
    net.conv(4)
    net.add(Relu(0.0))


def with_strides(net: Builder) -> None:
    net.conv(3, (3, 2), stride=(2, 1), padding=(2, 0))
    net.add(Relu(0.0))
    net.conv(4, (1, 3), stride=(1, 3), padding=(0, 2), bias=True)


def with_dilation(net: Builder) -> None:
    net.conv(3, (3, 2), dilation=(2, 3), padding=(1, 2))
    net.add(Relu(0.0))


def with_groups(net: Builder) -> None:
    net.conv(6, groups=2)
    net.add(Relu(0.0))
    net.conv(4, (2, 2), groups=2, stride=(2, 2), norm=False, bias=True)


def depthwise(net: Builder) -> None:
    net.conv(4, (1, 1), padding=(0, 0))
    net.add(Relu(6.0))
    net.conv(4, groups=4, stride=(2, 2))
    net.add(Relu(6.0))
    net.conv(8, groups=4, norm=False)


def residual(net: Builder) -> None:
    plain(net)
    net.residual()
    net.residual(projected=True)
    net.residual(relu=False)


def image_in_a_sum(net: Builder) -> None:
    net.residual()


def max_pooled(net: Builder) -> None:
    net.add(MaxPool((2, 3), (1, 2), (1, 1)))
    net.conv(3)
    net.add(MaxPool((3, 2), (2, 1), (1, 0)))


def average_pooled(net: Builder) -> None:
    plain(net)
    net.add(AvgPool((2, 2), (1, 2), (0, 0)))
    net.add(AvgPool((3, 2), (2, 1), (1, 1)))


def average_of_signed(net: Builder) -> None:
    net.conv(3)
    net.add(AvgPool((3, 3), (2, 2), (1, 1)))


def relu_of_codes(net: Builder) -> None:
    net.conv(4)
    net.add(MaxPool((2, 2), (1, 1), (0, 0)))
    net.add(Relu(6.0))


KINDS: list[Callable[[Builder], None]] = [
    plain,
    with_strides,
    with_dilation,
    with_groups,
    depthwise,
    residual,
    image_in_a_sum,
    max_pooled,
    average_pooled,
    average_of_signed,
    relu_of_codes,
]


@pytest.mark.parametrize("activation_bits", [1, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_equals_the_reference(
    kind: Callable[[Builder], None], activation_bits: int
) -> None:
    net = Builder()
    kind(net)
    net.head(mean=activation_bits < 8, hidden=9 if activation_bits == 8 else 0)
    graph = net.graph(activation_bits)
    images = random_images(graph, 2)
    check_against_reference(random_model(graph, seed=0), images)
    model = random_model(graph, seed=1, odd=False)
    check_against_reference(model, images)
    first, second = logits(model.program(), images)
    assert activation_bits == 1 or (first != second).any(), "the images were lost on the way"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("per_channel", [False, True])
def test_every_bit_width_equals_the_reference(bits: int, per_channel: bool) -> None:
    net = Builder(channels=1, height=5, width=3)
    plain(net)
    net.head(mean=False)
    graph = net.graph()
    model = random_model(graph, bits, bits=(bits,), per_channel=per_channel)
    check_against_reference(model, random_images(graph, 2))


@pytest.mark.parametrize("zero_point", [0, 128, 255])
def test_padding_of_the_image_is_real_zero(zero_point: int) -> None:
    net = Builder(channels=1, height=4, width=4, zero_point=zero_point)
    net.conv(2, padding=(2, 2), norm=False, bias=True)
    net.head()
    graph = net.graph()
    check_against_reference(random_model(graph, 1), random_images(graph, 2))
    # An image of nothing but its zero point is a real zero everywhere: padding changes nothing.
    model = random_model(graph, 2)
    blank = np.full((1, 4, 4, 1), zero_point, np.uint8)
    codes = trace_values(model.program(), blank)["n0.quantized"]
    np.testing.assert_array_equal(codes, np.broadcast_to(codes[:, :1, :1], codes.shape))


def test_a_linear_model_on_the_image() -> None:
    net = Builder(channels=3, height=3, width=5)
    net.head(mean=False, bias=False)
    graph = net.graph()
    check_against_reference(random_model(graph, 3), random_images(graph, 3))


def test_logits_that_are_a_sum() -> None:
    net = Builder(channels=1, height=3, width=3)
    flat = net.add(Flatten())
    left = net.add(Linear(9, 4, True))
    right = net.add(Linear(9, 4, False), flat)
    net.add(Add(), left, right)
    graph = net.graph()
    check_against_reference(random_model(graph, 4), random_images(graph, 3))


def test_one_value_read_by_several() -> None:
    """A convolution read by a sum (with a sign), and by a ReLU (without)."""
    net = Builder()
    source = net.conv(3)
    net.add(Relu(6.0))
    net.conv(3)
    branch = net.add(Relu(0.0))
    net.add(Add(), source, branch)
    net.add(Add(), net.last, net.last)
    net.head()
    graph = net.graph(3)
    check_against_reference(random_model(graph, 5), random_images(graph, 2))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "op", [AvgPool((3, 3), (2, 2), (1, 1)), AvgPool((2, 4), (1, 3), (1, 2)), AvgPool((2, 2), (2, 2), (0, 0))]
)
def test_an_average_pool_is_torchs_default_here_and_in_training(op: AvgPool, signed: bool) -> None:
    """Padding counts: the divisor is the size of the window wherever it lies."""
    import torch

    from fedmpq.training import torch_ops

    net = Builder()
    net.conv(4)
    if not signed:
        net.add(Relu(0.0))
    source = f"{net.last}.quantized"
    pool = net.add(op)
    net.head()
    model = random_model(net.graph(), 11, odd=False)
    program = model.program()
    values = trace_values(program, random_images(model.graph, 2))
    codes = torch.from_numpy(values[source]).float().permute(0, 3, 1, 2)
    got = torch.from_numpy(values[pool]).float().permute(0, 3, 1, 2)

    mean = torch.nn.functional.avg_pool2d(codes * float(program.formats[source].scale), *_sizes(op))
    step = float(program.formats[pool].scale)
    assert float((got * step - mean).abs().max()) <= 0.501 * step
    trained, _ = torch_ops.average_pool(torch_ops.Value(codes, program.formats[source]), op)
    assert trained.form == program.formats[pool]
    assert torch.equal(trained.tensor, got)


def _sizes(op: AvgPool) -> tuple[Size, Size, Size]:
    return op.kernel, op.stride, op.padding


@pytest.mark.parametrize("clip", [0.7, 1.1, 1.3, 2.3, 2.9, 5.9])
def test_sums_halfway_between_two_codes(clip: float) -> None:
    """Twice a code in steps of four of its own: every other one is a tie, to be divided in float32."""
    net = Builder()
    conv = net.conv(4)
    net.add(Add(), conv, conv)
    net.add(Relu(0.0))
    net.head()
    graph = net.graph(4)
    model = random_model(graph, 6, odd=False)
    model.side["n1.quantized.clip"] = np.array(clip, np.float32)
    model.side["n3.quantized.clip"] = np.array(clip * 60 / 127, np.float32)
    check_against_reference(model, random_images(graph, 1))


def test_sums_beyond_the_reach_of_float32() -> None:
    net = Builder(channels=1, height=40, width=40, zero_point=0)
    net.add(Flatten())
    net.add(Linear(1600, 3, True))
    graph = net.graph()
    model = random_model(graph, 6, bits=(8,))
    codes = np.random.default_rng(0).integers(250, 256, (3, 1600), dtype=np.uint8)
    model.layers["n1"] = replace(model.layers["n1"], codes=codes)
    images = np.random.default_rng(1).integers(250, 256, (2, 40, 40, 1), dtype=np.uint8)
    assert trace_values(model.program(), images)["n1"].min() > 2**24
    check_against_reference(model, images)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to three blocks and a head, of whatever sizes fit."""
    size = st.integers(1, 3)
    net = Builder(
        draw(st.integers(1, 3)), draw(st.integers(3, 6)), draw(st.integers(3, 6)), draw(st.integers(0, 255))
    )

    def pair(least: int, most: int) -> Size:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    def pool() -> None:
        kernel = (draw(st.integers(1, min(3, net.shape[1]))), draw(st.integers(1, min(3, net.shape[2]))))
        padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
        learnt = any(isinstance(node.op, Conv2d) for node in net.nodes)
        average = learnt and draw(st.booleans())
        net.add((AvgPool if average else MaxPool)(kernel, pair(1, 2), padding))

    def conv() -> None:
        kernel, padding, dilation = pair(1, 3), pair(0, 2), pair(1, 2)
        sides = zip(kernel, padding, dilation, net.shape[1:], strict=True)
        if any(d * (k - 1) + 1 > n + 2 * p for k, p, d, n in sides):
            kernel = (1, 1)
        groups = draw(st.sampled_from([1, net.shape[0]]))
        shape = {"stride": pair(1, 2), "padding": padding, "dilation": dilation, "groups": groups}
        norm, bias = draw(st.booleans()), draw(st.booleans())
        net.conv(groups * draw(size), kernel, norm=norm, bias=bias, **shape)
        if (maximum := draw(st.sampled_from([None, 0.0, 6.0]))) is not None:
            net.add(Relu(maximum))

    def block() -> None:
        net.residual(projected=draw(st.booleans()), relu=draw(st.booleans()))

    for kind in draw(st.lists(st.sampled_from([pool, conv, block]), max_size=2)):
        kind()
    conv()
    net.head(mean=draw(st.booleans()), bias=draw(st.booleans()), hidden=draw(st.sampled_from([0, 4])))
    return net.graph(draw(st.integers(1, 8)))


@settings(max_examples=150)
@given(graphs(), st.integers(0, 2**32 - 1))
def test_random_networks_equal_the_reference(graph: Graph, seed: int) -> None:
    check_against_reference(random_model(graph, seed), random_images(graph, 1, seed))


@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1e-30])
def test_a_channel_without_gamma_gives_its_offset(gamma: float) -> None:
    """Whatever the image: `clamp(rint(B / s_y))`, to which 2^30 adds less than a hundredth of a code."""
    net = Builder(channels=3, height=6, width=6)
    net.conv(9)
    net.add(Relu(0.0))
    net.head()
    graph = net.graph(8)
    model = random_model(graph, 7, bits=(8,))
    offsets = np.array([-1.0, 0, 0.003, 0.1, 0.3, 0.77, 1.01, 2.5, 40], np.float32)
    model.side |= {
        "n1.weight": np.full(9, gamma, np.float32),
        "n1.bias": offsets,
        "n2.quantized.clip": np.array(2.55, np.float32),
    }
    codes = trace_values(model.program(), random_images(graph, 3))["n2.quantized"]
    assert (np.abs(codes - np.clip(offsets / 0.01, 0, 255)) <= 0.51).all()
    expected = np.broadcast_to([0, 0, 0, 10, 30, 77, 101, 250, 255], codes.shape)
    np.testing.assert_array_equal(codes, expected)


# Products: NumPy's and torch's against whole numbers.


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: more of them only get in each other's way on work as small as this."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_products(
    op: Conv2d | Linear, codes: NDArray[np.int32], weight: NDArray[np.int8], bound: int
) -> None:
    from tests.training.torch_products import integer_products

    wide = weight.astype(np.int64)
    if isinstance(op, Linear):
        expected = codes.astype(np.int64) @ wide.T
    else:
        rows = codes.astype(np.int64).transpose(0, 3, 1, 2)
        expected = np.stack([slow_conv(image, wide, op) for image in rows]).transpose(0, 2, 3, 1)
    for products in (numpy_products, integer_products):
        got = products(codes, weight, op, bound)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=60)
@given(st.data())
def test_products_are_exact(data: st.DataObject) -> None:
    size, few = st.integers(1, 4), st.integers(0, 2)
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * data.draw(size), groups * data.draw(size)
    kernel, stride = (data.draw(size), data.draw(size)), (data.draw(size), data.draw(size))
    op = Conv2d(inputs, outputs, kernel, stride, (data.draw(few), data.draw(few)), (1, 2), groups, False)
    bound = data.draw(st.sampled_from([1, 15, 127, 255]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    height, width = kernel[0] + data.draw(few), 2 * kernel[1] + data.draw(few)
    codes = random.integers(-bound, bound + 1, (2, height, width, inputs), dtype=np.int32)
    check_products(op, codes, random.integers(-127, 128, op.weight_shape, dtype=np.int8), bound)


LONG: dict[str, Conv2d | Linear] = {
    "linear": Linear(2001, 3, False),
    "conv": Conv2d(75, 4, (3, 3), (2, 1), (1, 1), (1, 1), 1, False),
    "groups": Conv2d(122, 4, (3, 3), (2, 1), (1, 1), (1, 1), 2, False),
    "one channel": Conv2d(2, 2, (24, 23), (1, 1), (1, 1), (1, 1), 2, False),
}


@pytest.mark.parametrize("name", LONG)
def test_products_beyond_the_reach_of_float32_are_exact(name: str) -> None:
    op = LONG[name]
    random = np.random.default_rng(0)
    size = (24, 24) if name == "one channel" else (4, 3)
    shape = (2, op.in_features) if isinstance(op, Linear) else (2, *size, op.in_channels)
    codes = random.integers(253, 256, shape, dtype=np.int32)
    weight = random.integers(125, 128, op.weight_shape, dtype=np.int8)
    sums = numpy_products(codes, weight, op, 255)
    assert sums.max() > 2**24
    # Some of them float32 cannot even hold.
    assert (sums.astype(np.float32).astype(np.int64) != sums).any()
    check_products(op, codes, weight, 255)


def test_products_of_no_images() -> None:
    for op in (Linear(5, 3, False), LONG["conv"], LONG["groups"]):
        shape = (0, 5) if isinstance(op, Linear) else (0, 4, 3, op.in_channels)
        sums = numpy_products(np.zeros(shape, np.int32), np.ones(op.weight_shape, np.int8), op, 15)
        assert sums.shape[0] == 0
        assert sums.shape[-1] == op.weight_shape[0]


# Images and batches.


@cache
def small_model() -> Model:
    net = Builder()
    residual(net)
    net.add(AvgPool((2, 2), (1, 1), (1, 0)))
    net.head()
    return random_model(net.graph(), 8, odd=False)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 250])
def test_the_batch_size_changes_nothing(batch: int) -> None:
    from tests.training.torch_products import integer_products

    program = small_model().program()
    images = random_images(program.graph, 7)
    expected = logits(program, images, batch=7)
    assert expected.shape == (7, 3)
    assert expected.dtype == np.float32
    assert len(np.unique(expected, axis=0)) == 7
    np.testing.assert_array_equal(logits(program, images, batch=batch), expected)
    np.testing.assert_array_equal(logits(program, images, batch=batch, products=integer_products), expected)


def test_images_may_lie_scattered_in_memory() -> None:
    program = small_model().program()
    images = random_images(program.graph, 8)
    view = np.asfortranarray(images)[::-2]
    np.testing.assert_array_equal(logits(program, view), logits(program, images)[::-2])


def test_no_images_give_no_logits() -> None:
    net = Builder()
    with_groups(net)
    net.residual()
    net.add(MaxPool((2, 2), (1, 1), (1, 0)))
    net.head(mean=False)
    program = random_model(net.graph(), 9).program()
    empty = random_images(program.graph, 1)[:0]
    assert logits(program, empty).shape == (0, 3)
    assert logits(program, empty).dtype == np.float32
    traced, one = trace_values(program, empty), trace_values(program, random_images(program.graph, 1))
    assert {name: value.shape[1:] for name, value in traced.items()} == {
        name: value.shape[1:] for name, value in one.items()
    }
    assert traced[program.output].shape == (0, 3)


@pytest.mark.parametrize("call", [logits, trace_values])
def test_wrong_images_are_refused(call: Callable[..., object]) -> None:
    program = small_model().program()
    images = random_images(program.graph, 2)
    for wrong in (images[0], images.transpose(0, 3, 1, 2), images[..., :1], images[:, :-1]):
        with pytest.raises(ValueError, match=r"images have shape .* the model takes \(N, 7, 6, 2\)"):
            call(program, wrong)
    for kind in (np.float32, np.int64):
        with pytest.raises(ValueError, match=f"images are {np.dtype(kind)}, .* uint8"):
            call(program, images.astype(kind))


def test_a_batch_of_none_is_refused() -> None:
    program = small_model().program()
    for batch in (0, -3):
        with pytest.raises(ValueError, match=f"batch = {batch} is too small"):
            logits(program, random_images(program.graph, 2), batch=batch)


def test_values_are_dropped_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of the widest place, not of the whole network."""
    held: list[int] = []
    apply = integer_forward.apply

    def watched(step: Any, values: dict[str, Any], *rest: Any) -> Any:
        held.append(len(values))
        return apply(step, values, *rest)

    monkeypatch.setattr(integer_forward, "apply", watched)
    program = small_model().program()
    logits(program, random_images(program.graph, 1))
    assert len(held) == len(program.steps)
    assert max(held) <= 3


# Whole networks.


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["digits_cnn", "resnet8", "resnet20", "mobilenet_v2", "resnet18"])
def test_numpy_and_torch_agree_on_the_zoo(name: str) -> None:
    import torch

    from fedmpq.model import zoo
    from fedmpq.model.module_state import initial_state
    from fedmpq.model.trace import trace
    from tests.training.torch_products import integer_products

    torch.manual_seed(0)
    module = zoo.build(name, classes=10, channels=3)
    graph = trace(module, torch.zeros(1, 3, 32, 32), name=name, input_scale=0.02, input_zero_point=120)
    weights, side = initial_state(module, graph)
    # As if trained: with variances of 1, what these weights give would round to nothing on the way.
    side |= {name: value * F(0.05) for name, value in side.items() if name.endswith(".running_var")}
    layers = {
        node.name: QuantizedLayer.from_weights(weights[node.name], 1 + index % 8, "max", index % 2 == 0)
        for index, node in enumerate(graph.layers)
    }
    program = compile_program(graph, layers, side)
    images = random_images(graph, 2)
    with_torch = trace_values(program, images, products=integer_products)
    for value, expected in trace_values(program, images).items():
        np.testing.assert_array_equal(with_torch[value], expected, err_msg=value)
    assert len(np.unique(with_torch[program.output], axis=0)) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_trained_network_predicts_what_its_float_model_does() -> None:
    from fedmpq.exchange.messages import Assignment, TrainingPlan, pack_layers
    from fedmpq.lab.experiment import Experiment
    from fedmpq.lab.simulation import prepare
    from fedmpq.training.engine import make_engine
    from fedmpq.training.local_round import run_local_round
    from fedmpq.training.torch_engine import full_precision_logits
    from tests.training.torch_products import integer_products

    prepared = prepare(Experiment(data="digits", model="digits_cnn"))
    graph, start = prepared.start.graph, prepared.start.model
    first = {
        name: QuantizedLayer.from_weights(weights, 8, "least_error", False)
        for name, weights in start.weights.items()
    }
    plan = TrainingPlan(epochs=8, update="carried", code_learning_rate=0.1)
    assignment = Assignment(0, 1, 0, pack_layers(first), start.side, plan)
    engine = make_engine("torch")
    update = run_local_round(engine, graph, assignment, prepared.train)
    layers = engine.layers()
    assert all((layers[name].codes != first[name].codes).any() for name in layers)

    images, labels = prepared.test.images, prepared.test.labels
    weights = dequantize_all(layers)
    by_float = full_precision_logits(graph, weights, update.side, images)
    assert (by_float.argmax(1) == labels).mean() > 0.95
    # The codes that were trained, and the same W on another grid, as a server sends it.
    regridded = {
        name: QuantizedLayer.from_weights(weight, 8, "least_error", True) for name, weight in weights.items()
    }
    for model, tolerance in ((layers, 0.03), (regridded, 0.1)):
        program = compile_program(graph, model, update.side)
        by_codes = logits(program, images, products=integer_products)
        assert (by_codes.argmax(1) == by_float.argmax(1)).mean() >= 0.99
        # Near in value as well, not only in rank.
        assert math.sqrt(np.square(by_codes - by_float).mean()) < tolerance * by_float.std()
