"""Small graphs that between them have every operation in every role, with codes and side tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedmpq.model.dropout import Dropout
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
    Relu,
    Shape,
    Size,
    Slice,
    Upsample,
)
from fedmpq.model.ops import RULES
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.quantizers import place_quantizers
from fedmpq.training.engine import Batch

MIXED_BITS = (8, 4, 3, 6, 2, 5, 7, 1)


class Net:
    """A graph under construction; every method returns the name of what it adds."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        self._input = Input(channels, height, width, 0.015625, 110)
        self._nodes: list[Node] = []
        self._shapes: dict[str, Shape] = {INPUT: self._input.shape}

    def add(self, op: Op, *inputs: str) -> str:
        name = f"{type(op).__name__.lower()}{len(self._nodes)}"
        self._nodes.append(Node(name, op, inputs))
        self._shapes[name] = RULES[type(op)].shape(op, *(self._shapes[each] for each in inputs))
        return name

    def conv(
        self,
        source: str,
        channels: int,
        kernel: Size = (3, 3),
        stride: Size = (1, 1),
        padding: Size = (1, 1),
        *,
        dilation: Size = (1, 1),
        groups: int = 1,
        bias: bool = False,
        norm: bool = True,
        relu: float | None = 0.0,
    ) -> str:
        inputs = self._shapes[source][0]
        op = Conv2d(inputs, channels, kernel, stride, padding, dilation, groups, bias)
        return self._tail(self.add(op, source), norm, relu)

    def pointwise(self, source: str, channels: int, relu: float | None = 0.0) -> str:
        return self.conv(source, channels, (1, 1), padding=(0, 0), relu=relu)

    def linear(
        self, source: str, features: int, *, bias: bool = True, norm: bool = False, relu: float | None = None
    ) -> str:
        op = Linear(self._shapes[source][0], features, bias)
        return self._tail(self.add(op, source), norm, relu)

    def drop(self, name: str, rate: float, whole_channels: bool = False) -> str:
        """`name`, whose layer drops so much of what it reads."""
        number = max(i for i, node in enumerate(self._nodes) if isinstance(node.op, Conv2d | Linear))
        self._nodes[number] = replace(self._nodes[number], dropout=Dropout(rate, whole_channels))
        return name

    def relu(self, source: str, maximum: float = 0.0) -> str:
        return self.add(Relu(maximum), source)

    def graph(self, source: str, *, bias: bool = True, outputs: int = 5) -> Graph:
        """Five classes from `source`, an image or features, or other outputs."""
        if len(self._shapes[source]) == 3:
            source = self.add(Flatten(), source)
        logits = self.linear(source, outputs, bias=bias)
        return place_quantizers(Graph("small", self._input, tuple(self._nodes), logits), 4)

    def _tail(self, name: str, norm: bool, relu: float | None) -> str:
        if norm:
            name = self.add(BatchNorm(self._shapes[name][0], 1e-5, 0.125), name)
        return name if relu is None else self.relu(name, relu)


def convolutions() -> Graph:
    """Stride, padding beyond the kernel, dilation, groups, oblong kernels; with BatchNorm, bias or both.

    The bound of the second ReLU lies below its clip.
    """
    net = Net(3, 11, 9)
    x = net.conv(INPUT, 8)
    x = net.conv(x, 12, stride=(2, 2), relu=1.5)
    x = net.conv(x, 12, (3, 2), (1, 1), (2, 2), dilation=(2, 1), groups=3)
    x = net.conv(x, 20, (1, 3), (2, 1), (0, 1), norm=False, bias=True)
    x = net.conv(x, 10, (2, 2), (1, 2), (0, 0), bias=True, relu=6.0)
    return net.graph(net.add(GlobalAvgPool(), x))


def bottlenecks() -> Graph:
    """Depthwise layers, signed linear bottlenecks, an addition without ReLU, logits without bias."""
    net = Net(3, 8, 8)
    x = net.conv(INPUT, 8, relu=6.0)
    x = net.conv(net.pointwise(x, 24, 6.0), 24, groups=24, relu=6.0)
    x = net.pointwise(x, 8, None)
    y = net.conv(net.pointwise(x, 24, 6.0), 24, groups=24, relu=6.0)
    x = net.add(Add(), x, net.pointwise(y, 8, None))
    y = net.conv(net.pointwise(x, 24, 6.0), 24, (5, 5), (2, 2), (2, 2), groups=24, relu=6.0)
    x = net.conv(y, 12, (1, 1), padding=(0, 0), norm=False, bias=True, relu=None)
    x = net.conv(x, 12, padding=(2, 2), dilation=(2, 2), groups=12)
    return net.graph(net.add(GlobalAvgPool(), x), bias=False)


def residuals() -> Graph:
    """Identity and projection shortcuts, a value added to itself, ReLU6 behind a sum."""
    net = Net(1, 9, 9)
    x = net.conv(INPUT, 8)
    x = net.relu(net.add(Add(), net.conv(net.conv(x, 8), 8, relu=None), x))
    y = net.conv(net.conv(x, 16, stride=(2, 2)), 16, relu=None)
    x = net.relu(net.add(Add(), y, net.conv(x, 16, (1, 1), (2, 2), (0, 0), relu=None)))
    x = net.add(Add(), x, x)
    x = net.relu(net.add(Add(), x, net.conv(x, 16, relu=None)), 6.0)
    return net.graph(net.add(GlobalAvgPool(), x))


def pools() -> Graph:
    """Pools with padding and overlap, ReLU behind pools, Flatten of several pixels, hidden linear layers."""
    net = Net(3, 12, 12)
    x = net.add(MaxPool((3, 3), (2, 2), (1, 1)), net.conv(INPUT, 8, norm=False, bias=True))
    x = net.relu(net.add(MaxPool((2, 2), (1, 1), (0, 1)), net.conv(x, 9, relu=None)))
    x = net.conv(net.add(AvgPool((3, 2), (2, 1), (1, 1)), x), 11, relu=None)
    x = net.relu(net.add(AvgPool((2, 2), (1, 1), (0, 0)), x))
    x = net.linear(net.add(Flatten(), x), 14, norm=True, relu=0.0)
    x = net.linear(x, 7)
    x = net.linear(x, 6, bias=False, relu=0.0)
    return net.graph(x)


def joins() -> Graph:
    """Codes with and without a sign joined, joined again and normalized; parts taken, shuffled, padded and
    repeated; windows that reach beyond the image or differ in size."""
    net = Net(2, 9, 8)
    x = net.conv(net.add(Pad((0, 1), (1, 0)), INPUT), 6)
    y = net.conv(x, 5, norm=False, bias=True, relu=None)
    x = net.relu(net.add(Concat(), x, y, x))
    x = net.add(Concat(), net.conv(x, 5), net.add(Slice(3, 15), x))
    x = net.relu(net.add(BatchNorm(17, 1e-5, 0.125), x))
    x = net.add(ChannelShuffle(5), net.conv(x, 10))
    y = net.add(Upsample((2, 3)), net.add(MaxPool((3, 3), (2, 3), (1, 0), ceil_mode=True), x))
    x = net.add(Concat(), net.add(Slice(0, 4), y), net.add(Slice(4, 10), y))
    x = net.add(AvgPool((3, 2), (2, 2), (1, 1), ceil_mode=True, exclude_padding=True), x)
    x = net.conv(net.add(AdaptiveAvgPool((3, 2)), x), 7, (1, 1), padding=(0, 0))
    return net.graph(x)


def images() -> Graph:
    """The image read twice, once through a pool; 4-bit codes flattened."""
    net = Net(2, 8, 6)
    x = net.conv(net.add(MaxPool((2, 2), (2, 2), (0, 0)), INPUT), 3)
    x = net.relu(net.add(Add(), x, net.conv(INPUT, 3, stride=(2, 2))))
    return net.graph(net.add(MaxPool((2, 1), (1, 1), (0, 0)), x))


def gates() -> Graph:
    """Lookups of layers and of pools, squeeze and excitation, a product with itself behind a ReLU of one."""
    net = Net(2, 5, 4)
    x = net.add(Lookup("hardswish", 0.0), net.conv(INPUT, 4, relu=None))
    gate = net.conv(net.add(GlobalAvgPool(), x), 4, (1, 1), padding=(0, 0), norm=False, relu=None)
    x = net.add(Mul(), x, net.add(Lookup("sigmoid", 0.0), gate))
    x = net.relu(net.add(Lookup("silu", 0.0), net.conv(x, 4, relu=None)))
    x = net.add(Mul(), x, net.add(Lookup("leaky_relu", 0.25), x))
    x = net.relu(net.add(Mul(), x, x), 1.5)
    return net.graph(net.add(GlobalAvgPool(), x))


def dropouts() -> Graph:
    """Dropped elements of the image, channels, 4-bit codes that are read twice, and features."""
    net = Net(2, 5, 4)
    x = net.drop(net.conv(INPUT, 7), 0.125)
    x = net.drop(net.conv(x, 6), 0.25, whole_channels=True)
    x = net.add(Add(), net.drop(net.conv(x, 3, relu=None), 0.5), net.drop(net.conv(x, 3, relu=None), 0.25))
    x = net.drop(net.linear(net.add(Flatten(), net.relu(x)), 9, relu=0.0), 0.5)
    return net.graph(x)


GRAPHS: dict[str, Callable[[], Graph]] = {
    make.__name__: make
    for make in (convolutions, bottlenecks, residuals, pools, joins, images, gates, dropouts)
}


def random_state(
    graph: Graph, *, bits: tuple[int, ...] = MIXED_BITS, per_channel: bool = False, seed: int = 0
) -> tuple[Layers, Side]:
    """Codes of random weights, the bit-widths in turn, and side tensors that clip a few values."""
    random = np.random.default_rng(seed)
    layers: Layers = {}
    for index, node in enumerate(graph.layers):
        shape = graph.weight_shape(node.name)
        weights = random.normal(0, 1.4 * np.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
        width = bits[index % len(bits)]
        layers[node.name] = QuantizedLayer.from_weights(weights, width, "least_error", per_channel)
    about = {"clip": (2.5, 0.3), "weight": (1.0, 0.2), "running_var": (1.0, 0.2)}
    side: Side = {}
    for name, shape in graph.side_shapes().items():
        center, spread = about.get(name.rpartition(".")[2], (0.0, 0.2))
        side[name] = np.asarray(center + random.uniform(-spread, spread, shape), dtype=np.float32)
    return layers, side


def random_batch(graph: Graph, count: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    channels, height, width = graph.input.shape
    images = random.integers(0, 256, (count, height, width, channels)).astype(np.uint8)
    outputs = graph.shapes[graph.output][0]
    if graph.task == "classification":
        return images, random.integers(0, outputs, count)
    return images, random.integers(0, 2, (count, outputs)).astype(np.float32)
