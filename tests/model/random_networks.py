"""Small networks of every kind with a random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    Input,
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
from fedmpq.model.ops import RULES, Size
from fedmpq.model.pointwise import FUNCTIONS
from fedmpq.model.quantized import Layers, QuantizedLayer
from fedmpq.model.quantizers import place_quantizers
from tests.functions import PARAMETERS
from tests.model.integer_reference import Codes, F, Function, Model, Positive, Product, Real, Reference, Value


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
        if len(self.shape) > 1:
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
    if isinstance(value, Real | Function):
        return value.values.astype(np.float64)
    if isinstance(value, Codes | Product):
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


def functions(net: Builder) -> None:
    for function in FUNCTIONS:
        net.conv(4, (1, 1), padding=(0, 0))
        net.add(Lookup(function, PARAMETERS.get(function, 0.0)))


def relu_of_a_function(net: Builder) -> None:
    net.add(Lookup("silu", 0.0))
    net.add(Relu(0.0))
    net.conv(3)
    net.add(Lookup("tanh", 0.0))
    net.add(Relu(0.5))


def gated(net: Builder) -> None:
    """Squeeze and excitation, a value times another of its shape, and one times itself."""
    plain(net)
    source = net.last
    net.add(GlobalAvgPool())
    net.conv(4, (1, 1), padding=(0, 0), norm=False, bias=True)
    gate = net.add(Lookup("hardsigmoid", 0.0))
    product = net.add(Mul(), source, gate)
    net.conv(4)
    swish = net.add(Mul(), net.last, net.add(Lookup("sigmoid", 0.0)))
    net.add(Mul(), product, swish)
    net.add(Relu(6.0))
    net.add(Mul(), net.last, net.last)


def pooled_to_the_end(net: Builder) -> None:
    plain(net)
    net.add(MaxPool((3, 2), (2, 3), (1, 0), ceil_mode=True))
    net.add(AvgPool((3, 2), (2, 2), (1, 1), ceil_mode=True))
    net.add(AvgPool((2, 2), (1, 1), (1, 1), exclude_padding=True))


def pooled_unevenly(net: Builder) -> None:
    net.conv(3)
    net.add(AdaptiveAvgPool((5, 4)))
    net.add(MaxPool((2, 2), (3, 3), (0, 0), ceil_mode=True))


def joined(net: Builder) -> None:
    """Codes without a sign, then with one, then codes that were joined before."""
    plain(net)
    left = net.last
    net.conv(2)
    right = net.last
    net.last = left
    net.conv(3)
    net.add(Relu(6.0))
    both = net.add(Concat(), left, net.last)
    net.add(Concat(), both, right, left)
    net.add(BatchNorm(net.shape[0], 1e-5, 0.1))
    net.add(Relu(0.0))


def norm_of_codes(net: Builder) -> None:
    """Of the image, of a sum, and of features."""
    net.add(BatchNorm(2, 1e-5, 0.1))
    net.residual(relu=False)
    net.add(BatchNorm(2, 1e-5, 0.1))
    net.add(MaxPool((3, 3), (3, 3), (1, 1)))
    net.add(Flatten())
    net.add(BatchNorm(net.shape[0], 1e-3, 0.1))
    net.add(Relu(0.0))


def moved(net: Builder) -> None:
    net.add(Pad((1, 0), (0, 2)))
    net.conv(6)
    net.add(Relu(0.0))
    net.add(ChannelShuffle(3))
    net.add(Slice(1, 5))
    net.add(Upsample((2, 1)))
    net.add(Pad((0, 1), (2, 1)))


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
    pooled_to_the_end,
    pooled_unevenly,
    joined,
    norm_of_codes,
    moved,
    relu_of_codes,
    functions,
    gated,
    relu_of_a_function,
]
