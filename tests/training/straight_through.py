"""A graph as autograd sees it, and networks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

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
from fedmpq.model.pointwise import FUNCTIONS
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.quantizers import place_quantizers
from fedmpq.training.torch_engine import _Network
from fedmpq.training.torch_ops import LayerWeight
from tests.functions import PARAMETERS, TORCH

IMAGE = Input(channels=4, height=7, width=6, scale=0.015625, zero_point=120)


def rounded(real: Tensor, scale: float) -> Tensor:
    """Rounded to multiples of `scale`; the gradient passes."""
    return real + (torch.round(real / scale) * scale - real).detach()


class StraightThrough:
    """A graph as autograd sees it; `margin` is how near, in codes, a value came to another code or mask."""

    def __init__(self, graph: Graph, layers: Layers, side: Side) -> None:
        self.graph = graph
        self.weights = {
            name: torch.tensor(layer.weights(), dtype=torch.float64, requires_grad=True)
            for name, layer in layers.items()
        }
        self.side = {
            name: torch.tensor(tensor, dtype=torch.float64, requires_grad="running" not in name)
            for name, tensor in side.items()
        }
        self.margin = math.inf

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        image = self.graph.input
        pixels = torch.tensor(images, dtype=torch.float64).permute(0, 3, 1, 2)
        values: dict[str, Tensor] = {INPUT: (pixels - image.zero_point) * image.scale}
        self.scales: dict[str, float] = {INPUT: image.scale}
        for node in self.graph.nodes:
            values[node.name] = self._apply(node, [values[name] for name in node.inputs])
        return values[self.graph.output]

    def _apply(self, node: Node, inputs: list[Tensor]) -> Tensor:
        op, x = node.op, inputs[0]
        if isinstance(op, Conv2d | Linear):
            return self._product(node.name, op, x)
        if isinstance(op, BatchNorm):
            gamma, beta, mean, var = (
                self.side[f"{node.name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
            )
            return functional.batch_norm(x, mean, var, gamma, beta, True, op.momentum, op.eps)
        if isinstance(op, Relu):
            return x  # the quantizer behind it cuts at zero, and needs to see what was cut
        if isinstance(op, Quantize):
            return self._quantize(node, op, x)
        if isinstance(op, Add):
            return inputs[0] + inputs[1]
        if isinstance(op, Mul):
            return inputs[0] * inputs[1]
        if isinstance(op, Lookup):
            return TORCH[op.function](x, op.parameter)
        if isinstance(op, Concat):
            return self._concat(node, inputs)
        self.scales[node.name] = self.scales[node.inputs[0]]
        if isinstance(op, AvgPool | GlobalAvgPool | AdaptiveAvgPool):
            return self._average(node, op, x)
        return moved(x, op)

    def _product(self, name: str, op: Conv2d | Linear, x: Tensor) -> Tensor:
        weight, bias = self.weights[name], self.side[f"{name}.bias"] if op.bias else None
        if isinstance(op, Linear):
            return functional.linear(x, weight, bias)
        return functional.conv2d(x, weight, bias, op.stride, op.padding, op.dilation, op.groups)

    def _quantize(self, node: Node, op: Quantize, x: Tensor) -> Tensor:
        clip = self.side[f"{node.name}.clip"]
        source = self.graph.by_name[node.inputs[0]].op
        if isinstance(source, Relu) and source.maximum > 0:
            clip = torch.minimum(clip, torch.tensor(source.maximum, dtype=torch.float64))
        if isinstance(source, Lookup) and source.function in ("sigmoid", "hardsigmoid", "tanh"):
            clip = torch.minimum(clip, torch.tensor(1.0, dtype=torch.float64))
        top = 2 ** (op.bits - 1) - 1 if op.signed else 2**op.bits - 1
        scale = float(clip.detach()) / top
        low = -clip if op.signed else torch.zeros_like(clip)
        clipped = torch.where(x >= clip, clip, torch.where(x <= low, low, x))
        self.scales[node.name] = scale
        self._note_margin(x.detach() / scale, top, -top if op.signed else 0)
        return rounded(clipped, scale)

    def _note_margin(self, steps: Tensor, high: int, low: int) -> None:
        halfway = (steps - torch.floor(steps) - 0.5).abs()
        inside = halfway[(steps > low) & (steps < high)]
        for distances in (inside, (steps - high).abs(), (steps - low).abs()):
            if distances.numel():
                self.margin = min(self.margin, float(distances.min()))

    def _form(self, name: str) -> tuple[np.float32, np.float32, bool]:
        """Scale, greatest code and sign of codes."""
        node = self.graph.by_name[name]
        scale, op = np.float32(self.scales[name]), node.op
        if isinstance(op, Quantize):
            top = 2 ** (op.bits - 1) - 1 if op.signed else 2**op.bits - 1
            return scale, np.float32(top), op.signed
        signed = any(self._form(source)[2] for source in node.inputs)
        if isinstance(op, Concat | AvgPool | GlobalAvgPool | AdaptiveAvgPool):
            return scale, np.float32(127 if signed else 255), signed
        return scale, self._form(node.inputs[0])[1], signed

    def _concat(self, node: Node, inputs: list[Tensor]) -> Tensor:
        """The program's own float32 decides how codes are rounded to the widest range."""
        forms = [self._form(name) for name in node.inputs]
        wide = np.float32(127 if any(signed for _, _, signed in forms) else 255)
        target = np.float32(max(scale * high for scale, high, _ in forms) / wide)
        self.scales[node.name] = float(target)
        parts = []
        for x, (scale, _, _) in zip(inputs, forms, strict=True):
            codes = torch.round(x.detach() / float(scale)).float()
            again = torch.round(codes * float(np.float32(scale / target))) * float(target)
            parts.append(x + (again - x).detach())
        return torch.cat(parts, dim=1)

    def _average(self, node: Node, op: AvgPool | GlobalAvgPool | AdaptiveAvgPool, x: Tensor) -> Tensor:
        ones = torch.ones_like(x[:1, :1])
        if isinstance(op, AvgPool):
            window = op.kernel, op.stride, op.padding, op.ceil_mode
            pooled = functional.avg_pool2d(x, *window, count_include_pad=not op.exclude_padding)
            under = functional.avg_pool2d(ones, *window, divisor_override=1)
            size = under / functional.avg_pool2d(ones, *window, count_include_pad=not op.exclude_padding)
        else:
            pooled = functional.adaptive_avg_pool2d(x, 1 if isinstance(op, GlobalAvgPool) else op.size)
            rows, columns = (_sizes(n, m) for n, m in zip(x.shape[2:], pooled.shape[2:], strict=True))
            size = rows[:, None] * columns
        # Averages often lie halfway between two 8-bit codes: there only the program's own float32 decides.
        scale, high, signed = self._form(node.inputs[0])
        target = np.float32(scale * high / np.float32(127 if signed else 255))
        sums = torch.round(pooled.detach() / float(scale) * size).float()
        multipliers = np.asarray(scale / (target * torch.round(size).float().numpy()), np.float32)
        codes = torch.round(sums * torch.from_numpy(multipliers))
        self.scales[node.name] = float(target)
        return pooled + (codes * float(target) - pooled).detach()


def _sizes(size: int, windows: int) -> Tensor:
    """How many of `size` elements each window of an adaptive pool has."""
    starts = [i * size // windows for i in range(windows)]
    ends = [math.ceil((i + 1) * size / windows) for i in range(windows)]
    return torch.tensor(ends, dtype=torch.float64) - torch.tensor(starts, dtype=torch.float64)


def moved(x: Tensor, op: Op) -> Tensor:
    """What hands codes on."""
    if isinstance(op, MaxPool):
        return functional.max_pool2d(x, op.kernel, op.stride, op.padding, ceil_mode=op.ceil_mode)
    if isinstance(op, Flatten):
        return torch.flatten(x, 1)
    if isinstance(op, Slice):
        return x[:, op.start : op.stop]
    if isinstance(op, ChannelShuffle):
        return functional.channel_shuffle(x, op.groups)
    if isinstance(op, Pad):
        return functional.pad(x, (op.before[1], op.after[1], op.before[0], op.after[0]))
    assert isinstance(op, Upsample)
    return x.repeat_interleave(op.factor[0], dim=2).repeat_interleave(op.factor[1], dim=3)


def conv(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int] = 3,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    bias: bool = False,
) -> Conv2d:
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    return Conv2d(inputs, outputs, size, stride, padding, dilation, groups, bias)


def norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, 1e-5, 0.125)


Link = tuple[str, Op, tuple[str, ...]]


def chain(*ops: Op) -> list[Link]:
    """Each operation reads the one before it."""
    names = [INPUT, *(f"op{i}" for i in range(len(ops)))]
    return [(names[i + 1], op, (names[i],)) for i, op in enumerate(ops)]


HEAD = (GlobalAvgPool(), Flatten())

NETWORKS: dict[str, list[Link]] = {
    "plain conv": chain(conv(4, 6, bias=True), Relu(0.0), *HEAD, Linear(6, 3, True)),
    "stride and padding": chain(
        conv(4, 6, (3, 2), stride=(2, 1), padding=(2, 1)),
        norm(6),
        Relu(0.0),
        conv(6, 5, 3, stride=(1, 2), padding=(1, 1)),
        norm(5),
        Relu(0.0),
        *HEAD,
        Linear(5, 3, True),
    ),
    "dilation": chain(
        conv(4, 5, 3, padding=(2, 2), dilation=(2, 2)),
        norm(5),
        Relu(0.0),
        conv(5, 4, (2, 3), dilation=(3, 1)),
        norm(4),
        Relu(0.0),
        *HEAD,
        Linear(4, 3, False),
    ),
    "groups": chain(
        conv(4, 6, groups=2), norm(6), Relu(0.0), conv(6, 9, groups=3), Relu(0.0), *HEAD, Linear(9, 3, True)
    ),
    "depthwise": chain(
        conv(4, 4, padding=(1, 1), groups=4),
        norm(4),
        Relu(6.0),
        conv(4, 8, stride=(2, 2), groups=4),
        norm(8),
        Relu(6.0),
        conv(8, 5, 1),
        norm(5),
        *HEAD,
        Linear(5, 3, True),
    ),
    "linear with batch norm": chain(
        Flatten(), Linear(168, 8, False), norm(8), Relu(0.0), Linear(8, 5, True), Linear(5, 3, True)
    ),
    "max pools": chain(
        conv(4, 5, padding=(1, 1)),
        norm(5),
        Relu(0.0),
        MaxPool((3, 3), (2, 2), (1, 1)),
        conv(5, 6, 2),
        norm(6),
        MaxPool((2, 2), (1, 1), (1, 1)),
        Flatten(),
        Linear(72, 3, True),
    ),
    "average pools": chain(
        conv(4, 5),
        norm(5),
        Relu(0.0),
        AvgPool((2, 2), (1, 1), (1, 0)),
        conv(5, 6, 2),
        norm(6),
        AvgPool((2, 2), (2, 1), (0, 1)),
        Flatten(),
        Linear(36, 3, True),
    ),
    "relu behind a pool of codes": chain(
        conv(4, 5), norm(5), MaxPool((2, 2), (2, 2), (0, 0)), Relu(0.0), *HEAD, Linear(5, 3, True)
    ),
    "residual": [
        ("a", conv(4, 5, padding=(1, 1)), (INPUT,)),
        ("an", norm(5), ("a",)),
        ("ar", Relu(0.0), ("an",)),
        ("b", conv(5, 5, padding=(1, 1)), ("ar",)),
        ("bn", norm(5), ("b",)),
        ("s", Add(), ("bn", "ar")),
        ("sr", Relu(6.0), ("s",)),
        ("d", conv(5, 5, 1), ("sr",)),
        ("dn", norm(5), ("d",)),
        ("e", conv(4, 5, 1), (INPUT,)),
        ("en", norm(5), ("e",)),
        ("t", Add(), ("dn", "en")),
        ("tt", Add(), ("t", "t")),
        ("g", GlobalAvgPool(), ("tt",)),
        ("f", Flatten(), ("g",)),
        ("out", Linear(5, 3, True), ("f",)),
    ],
    "squeeze and excitation": [
        ("a", conv(4, 5, stride=(2, 2)), (INPUT,)),
        ("an", norm(5), ("a",)),
        ("p", GlobalAvgPool(), ("an",)),
        ("s", conv(5, 5, 1, bias=True), ("p",)),
        ("g", Lookup("sigmoid", 0.0), ("s",)),
        ("m", Mul(), ("an", "g")),
        ("f", Flatten(), ("m",)),
        ("out", Linear(30, 3, True), ("f",)),
    ],
    "products of equal shapes": [
        ("a", conv(4, 4, stride=(2, 2)), (INPUT,)),
        ("an", norm(4), ("a",)),
        ("b", conv(4, 4, stride=(2, 2), bias=True), (INPUT,)),
        ("m", Mul(), ("an", "b")),
        ("f", Flatten(), ("m",)),
        ("out", Linear(24, 3, True), ("f",)),
    ],
    "relu of a function": chain(
        conv(4, 5, stride=(2, 2)), norm(5), Lookup("silu", 0.0), Relu(0.0), *HEAD, Linear(5, 3, True)
    ),
    "pools of every window": chain(
        conv(4, 5, padding=(1, 1)),
        norm(5),
        Relu(0.0),
        MaxPool((3, 2), (2, 3), (1, 0), ceil_mode=True),
        Upsample((2, 1)),
        AvgPool((3, 2), (2, 2), (1, 1), ceil_mode=True),
        AvgPool((2, 2), (1, 1), (1, 1), exclude_padding=True),
        AdaptiveAvgPool((3, 2)),
        Flatten(),
        Linear(30, 3, True),
    ),
    "joined": [
        ("p", Pad((1, 0), (0, 2)), (INPUT,)),
        ("a", conv(4, 5, padding=(1, 1)), ("p",)),
        ("an", norm(5), ("a",)),
        ("ar", Relu(0.0), ("an",)),
        ("b", conv(5, 4, 1, bias=True), ("ar",)),
        ("j", Concat(), ("ar", "b", "ar")),
        ("jn", norm(14), ("j",)),
        ("jr", Relu(0.0), ("jn",)),
        ("m", ChannelShuffle(7), ("jr",)),
        ("s", Slice(2, 9), ("m",)),
        ("c", conv(7, 6, padding=(0, 0)), ("s",)),
        ("cn", norm(6), ("c",)),
        ("cr", Relu(0.0), ("cn",)),
        ("t", Slice(0, 5), ("cr",)),
        ("k", Concat(), ("cr", "t")),
        ("g", GlobalAvgPool(), ("k",)),
        ("f", Flatten(), ("g",)),
        ("out", Linear(11, 3, True), ("f",)),
    ],
    "codes at the end": chain(conv(4, 5), norm(5), Relu(0.0), conv(5, 3, 1, bias=True), Relu(0.0), *HEAD),
    "sum of logits": [
        ("f", Flatten(), (INPUT,)),
        ("p", Linear(168, 3, True), ("f",)),
        ("q", Linear(168, 3, False), ("f",)),
        ("out", Add(), ("p", "q")),
    ],
}


for _function in FUNCTIONS:
    NETWORKS[_function] = chain(
        conv(4, 4, stride=(2, 2)),
        norm(4),
        Lookup(_function, PARAMETERS.get(_function, 0.0)),
        conv(4, 5, 2),
        norm(5),
        Relu(0.0),
        *HEAD,
        Linear(5, 3, True),
    )


# Codes cut at one clip are cut at the next one only if it is smaller, and then the first one has no gradient.
IDLE = {
    "relu behind a pool of codes": "op3.quantized.clip",
    "residual": "tt.quantized.clip",
    "relu of a function": "op1.quantized.clip",
    "tanh": "op1.quantized.clip",
}


def build(links: Sequence[Link]) -> Graph:
    nodes = tuple(Node(*link) for link in links)
    return place_quantizers(Graph("test", IMAGE, nodes, nodes[-1].name), 4)


def random_state(graph: Graph, random: np.random.Generator) -> tuple[Layers, Side]:
    layers: Layers = {}
    for i, node in enumerate(graph.layers):
        shape = graph.weight_shape(node.name)
        weights = random.normal(0, math.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
        bits = (4, 8, 2, 6, 1)[i % 5]
        layers[node.name] = QuantizedLayer.from_weights(weights, bits, "least_error", i % 2 == 0)
    side: Side = {}
    for name, shape in graph.side_shapes().items():
        part = name.rpartition(".")[2]
        low, high = {"clip": (0.15, 0.9), "weight": (0.6, 1.4), "running_var": (0.5, 1.5)}.get(
            part, (-0.5, 0.5)
        )
        side[name] = np.asarray(random.uniform(low, high, shape), dtype=np.float32)
    return layers, side


class Case(NamedTuple):
    """A state, images, and what autograd makes of `sum(logits * pull)`."""

    layers: Layers
    side: Side
    images: NDArray[np.uint8]
    pull: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]
    side_after: dict[str, Tensor]


Adjust = Callable[[Side], None]


def settled(graph: Graph, batch: int, margin: float, adjust: Adjust, idle: frozenset[str]) -> Case:
    """The first seed that makes a fair comparison.

    No value is so near to rounding the other way that float32 could do so, and all but the `idle` parameters
    have a gradient.
    """
    image = graph.input
    for seed in range(300):
        random = np.random.default_rng(seed)
        layers, side = random_state(graph, random)
        adjust(side)
        images = random.integers(0, 256, (batch, image.height, image.width, image.channels)).astype(np.uint8)
        reference = StraightThrough(graph, layers, side)
        logits = reference.logits(images)
        if reference.margin <= margin:
            continue
        pull = torch.tensor(random.normal(size=tuple(logits.shape)))
        (logits * pull).sum().backward()
        learnt = {name: t for name, t in (reference.weights | reference.side).items() if t.requires_grad}
        # torch.minimum gives no gradient to the operand that is not the least.
        gradients = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in learnt.items()}
        if {name for name, gradient in gradients.items() if not gradient.any()} == idle:
            return Case(layers, side, images, pull, logits.detach(), gradients, reference.side)
    raise AssertionError("no seed makes a fair comparison; make the network smaller")


def network_gradients(
    graph: Graph, layers: Layers, side: Side, images: NDArray[np.uint8], pull: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Logits, gradients of `sum(logits * pull)`, and the side tensors after the forward pass."""

    def weight(name: str) -> LayerWeight:
        layer = layers[name]
        bound = 127 if layer.bits == 8 else 2**layer.bits - 1
        integers = torch.from_numpy(layer.integer_weights()).float()
        return LayerWeight(integers, torch.tensor(layer.integer_scale()), bound)

    tensors = {name: torch.tensor(tensor) for name, tensor in side.items()}
    gradients: dict[str, Tensor] = {}
    with torch.no_grad():
        network = _Network(graph, tensors, weight, training=True)
        network.on_weight = network.on_side = gradients.__setitem__
        logits = network.forward(images)
        network.backward(pull)
    return logits, gradients, tensors


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Relative to the tensor's own size: its smallest entries are differences of large ones."""
    assert got.shape == expected.shape, what
    size = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((got.double() - expected).abs().max())
    assert error <= tolerance * max(size, 1e-6), f"{what}: off by {error} of {size}"
