"""The hand-written backward passes against autograd on a straight-through network, and exact integer sums.

The reference is float64 and knows no codes: it rounds real values with `y + (rounded - y).detach()` and clips
by `where`, from which autograd derives the gradients of inputs and clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedmpq.model.activations import CodeFormat
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
from fedmpq.model.integer_forward import numpy_products
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.quantizers import place_quantizers
from fedmpq.training import torch_ops
from fedmpq.training.torch_engine import _Network
from fedmpq.training.torch_ops import LayerWeight, Packed, Value
from tests.training.torch_products import integer_products

pytestmark = pytest.mark.usefixtures("one_thread")

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
        self.scales[node.name] = self.scales[node.inputs[0]]
        if isinstance(op, MaxPool):
            return functional.max_pool2d(x, op.kernel, op.stride, op.padding)
        if isinstance(op, Flatten):
            return torch.flatten(x, 1)
        return self._average(node, op, x)

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

    def _average(self, node: Node, op: AvgPool | GlobalAvgPool, x: Tensor) -> Tensor:
        kernel = op.kernel if isinstance(op, AvgPool) else tuple(x.shape[2:])
        stride, padding = (op.stride, op.padding) if isinstance(op, AvgPool) else (kernel, (0, 0))
        pooled = functional.avg_pool2d(x, kernel, stride, padding)
        source = self.graph.by_name[node.inputs[0]]
        while not isinstance(source.op, Quantize):
            source = self.graph.by_name[source.inputs[0]]
        signed = source.op.signed
        high = 2 ** (source.op.bits - 1) - 1 if signed else 2**source.op.bits - 1
        # Averages often lie halfway between two 8-bit codes: there only the program's own float32 decides.
        wide = np.float32(127 if signed else 255)
        scale = np.float32(self.scales[node.inputs[0]])
        target = np.float32(scale * np.float32(high) / wide)
        window = np.float32(kernel[0] * kernel[1])
        sums = torch.round(pooled.detach() / float(scale) * float(window)).float()
        codes = torch.round(sums * float(np.float32(scale / (target * window))))
        self.scales[node.name] = float(target)
        return pooled + (codes * float(target) - pooled).detach()


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
    "sum of logits": [
        ("f", Flatten(), (INPUT,)),
        ("p", Linear(168, 3, True), ("f",)),
        ("q", Linear(168, 3, False), ("f",)),
        ("out", Add(), ("p", "q")),
    ],
}


# Codes cut at one clip are cut at the next one only if it is smaller, and then the first one has no gradient.
IDLE = {"relu behind a pool of codes": "op3.quantized.clip", "residual": "tt.quantized.clip"}


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


def check_against_autograd(
    graph: Graph,
    batch: int,
    margin: float,
    adjust: Adjust = lambda _: None,
    idle: frozenset[str] = frozenset(),
) -> None:
    case = settled(graph, batch, margin, adjust, idle)
    logits, gradients, after = network_gradients(
        graph, case.layers, case.side, case.images, case.pull.float()
    )
    assert_close(logits, case.logits, "logits")
    assert gradients.keys() == case.gradients.keys()
    for name, expected in case.gradients.items():
        assert_close(gradients[name], expected, name)
    for name, tensor in case.side.items():
        if "running" in name:
            assert_close(after[name], case.side_after[name], name)
        else:
            assert np.array_equal(after[name].numpy(), tensor), name


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_autograd(name: str) -> None:
    idle = frozenset({IDLE[name]} if name in IDLE else ())
    check_against_autograd(build(NETWORKS[name]), batch=3, margin=1e-4, idle=idle)


def test_gradients_of_digits_cnn_equal_autograd(digits: Any) -> None:
    check_against_autograd(digits.graph, batch=2, margin=2e-5)


@pytest.mark.parametrize("clip", [5.0, 7.0])
def test_relu6_bounds_the_clip(clip: float) -> None:
    """Below 6 the clip cuts and learns; above, ReLU6 cuts and the clip has no gradient."""
    name = "op2.quantized.clip"

    def stretch(side: Side) -> None:
        side[name] = np.asarray(clip, dtype=np.float32)
        side["op1.weight"] = np.full_like(side["op1.weight"], 6.0)

    links = chain(conv(4, 5), norm(5), Relu(6.0), *HEAD, Linear(5, 3, True))
    idle = frozenset() if clip < 6 else frozenset({name})
    check_against_autograd(build(links), 3, 1e-4, stretch, idle)


def naive_products(
    codes: NDArray[np.int64], weight: NDArray[np.int64], op: Conv2d | Linear
) -> NDArray[np.int64]:
    """Sums over each window in int64; codes `(N, C, H, W)` or `(N, F)`."""
    if isinstance(op, Linear):
        return np.asarray(codes @ weight.T)
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = op.kernel, op.stride, op.padding, op.dilation
    padded = np.pad(codes, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    height = (padded.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    out = np.zeros((len(codes), op.out_channels, height, width), np.int64)
    per_group, out_per_group = op.in_channels // op.groups, op.out_channels // op.groups
    for channel in range(op.out_channels):
        first = channel // out_per_group * per_group
        for y in range(height):
            for x in range(width):
                window = padded[:, first : first + per_group, y * sh :, x * sw :]
                window = window[:, :, : dh * (kh - 1) + 1 : dh, : dw * (kw - 1) + 1 : dw]
                out[:, channel, y, x] = (window * weight[channel]).sum(axis=(1, 2, 3))
    return out


LARGE: dict[str, tuple[Conv2d | Linear, tuple[int, ...]]] = {
    "linear": (Linear(2000, 3, False), (2000,)),
    "linear, the widest": (Linear(65536, 2, False), (65536,)),
    "channels": (conv(150, 3, padding=(1, 1), stride=(2, 1), dilation=(1, 2)), (150, 6, 6)),
    "groups": (conv(300, 4, groups=2), (300, 4, 3)),
    "one channel is too much": (conv(3, 2, 24), (3, 24, 25)),
    "small": (conv(5, 3, padding=(1, 1)), (5, 4, 4)),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_are_exact_whatever_their_size(name: str) -> None:
    """Extreme codes and weights, so that true sums pass 2^24 and are odd: float32 cannot even hold them."""
    op, shape = LARGE[name]
    random = np.random.default_rng(3)
    codes = random.integers(253, 256, (2, *shape))
    weight = random.integers(125, 128, op.weight_shape) * np.where(
        random.random(op.weight_shape) < 0.02, -1, 1
    )
    expected = naive_products(codes, weight, op)
    if name != "small":
        assert np.abs(expected).max() > 2**24
        assert (expected != expected.astype(np.float32).astype(np.int64)).any()
    source, integers = torch.from_numpy(codes).float(), torch.from_numpy(weight).float()
    got = torch_ops.products(source, integers, op, 255 * 127)
    assert np.array_equal(got.to(torch.int64).numpy(), expected)

    rows = np.ascontiguousarray(codes.transpose(0, 2, 3, 1) if codes.ndim == 4 else codes).astype(np.int32)
    by_engine = integer_products(rows, weight.astype(np.int8), op, 255)
    assert by_engine.dtype == np.int32
    assert np.array_equal(by_engine, numpy_products(rows, weight.astype(np.int8), op, 255))
    assert np.array_equal(by_engine.transpose(0, 3, 1, 2) if by_engine.ndim == 4 else by_engine, expected)


def test_products_are_the_same_on_two_threads() -> None:
    random = np.random.default_rng(4)
    op = conv(64, 16, padding=(1, 1))
    codes = torch.from_numpy(random.integers(0, 16, (4, 64, 16, 16))).float()
    weight = torch.from_numpy(random.integers(-127, 128, op.weight_shape)).float()
    alone = torch_ops.products(codes, weight, op, 15 * 127)
    torch.set_num_threads(2)
    assert torch.equal(torch_ops.products(codes, weight, op, 15 * 127), alone)


formats = st.sampled_from(
    [
        CodeFormat(np.float32(0.1), 0, 15),
        CodeFormat(np.float32(0.1), 0, 3),
        CodeFormat(np.float32(0.1), -7, 7),
        CodeFormat(np.float32(0.1), 0, 255),
        CodeFormat(np.float32(0.1), -127, 127),
        CodeFormat(np.float32(0.1), -120, 135),
    ]
)


@given(
    formats,
    st.one_of(st.tuples(*[st.integers(1, 5)] * 2), st.tuples(*[st.integers(1, 5)] * 4)),
    st.integers(0, 9),
)
def test_packing_loses_nothing(form: CodeFormat, shape: tuple[int, ...], seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(form.low, form.high + 1, shape)).float()
    packed = Packed.pack(codes, form)
    again = packed.unpack()
    assert again.dtype == torch.float32
    assert torch.equal(again, codes)
    assert torch.equal(packed.unpack(), codes)
    per_byte = 2 if form.high - form.low <= 15 else 1
    assert packed.data.dtype == torch.uint8
    assert packed.data.nbytes == packed.data.untyped_storage().nbytes() == -(-codes.numel() // per_byte)


def test_a_value_is_packed_once() -> None:
    value = Value(torch.ones(2, 3), CodeFormat(np.float32(0.5), 0, 15))
    assert value.packed() is value.packed()


@pytest.mark.parametrize("signed", [False, True])
def test_quantize_rounds_half_to_even_and_clips(signed: bool) -> None:
    form = CodeFormat.quantized(np.float32(3.5 if signed else 7.5), 0.0, 4, signed)
    assert form.scale == 0.5
    steps = [-30.0, -7.2, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 6.4999995, 7.0, 14.5, 30.0, math.inf]
    low, high = (-7, 7) if signed else (0, 15)
    value, _ = torch_ops.quantize(Value(torch.tensor(steps) * 0.5), form, True)
    assert value.form == form
    assert value.tensor.tolist() == np.clip(np.rint(steps), low, high).tolist()


@pytest.mark.parametrize(("low", "high"), [(0, 15), (-127, 127), (0, 255), (0, 3)])
def test_averages_equal_the_integer_program(low: int, high: int) -> None:
    """Ties and all: `rint(float32(sum) * multiplier)`, with the program's float32 multiplier."""
    random = np.random.default_rng(7)
    for clip in (0.7, 1.0, 2.9, 6.0):
        form = CodeFormat(np.float32(np.float32(clip) / np.float32(high)), low, high)
        codes = random.integers(low, high + 1, (3, 4, 4, 6))
        for op in (None, AvgPool((2, 2), (2, 2), (1, 0)), AvgPool((2, 3), (1, 2), (0, 1))):
            value, _ = torch_ops.average_pool(Value(torch.from_numpy(codes).float(), form), op)
            kernel, stride, (ph, pw) = (op.kernel, op.stride, op.padding) if op else ((4, 6), (1, 1), (0, 0))
            padded = np.pad(codes, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
            sums = windows[:, :, :: stride[0], :: stride[1]].sum(axis=(4, 5)).astype(np.float32)
            target = form.averaged()
            multiplier = np.float32(form.scale / (target.scale * np.float32(kernel[0] * kernel[1])))
            expected = np.clip(np.rint(sums * multiplier), target.low, target.high)
            assert value.form == target
            assert np.array_equal(value.tensor.numpy(), expected)


def test_cross_entropy_equals_autograd() -> None:
    random = np.random.default_rng(2)
    logits = torch.tensor(random.normal(0, 5, (7, 4)), requires_grad=True)
    labels = torch.from_numpy(random.integers(0, 4, 7))
    expected = functional.cross_entropy(logits, labels)
    expected.backward()
    assert logits.grad is not None
    loss, right, gradient = torch_ops.cross_entropy(logits.detach().float(), labels)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert right == int((logits.argmax(1) == labels).sum())
    assert_close(gradient, logits.grad, "logits", 1e-6)


def test_full_precision_weights_are_not_rounded() -> None:
    """`bound = 0`: products of codes and real weights, as the accuracy of W itself needs them."""
    form = CodeFormat(np.float32(0.25), 0, 15)
    codes = torch.tensor([[1.0, 2.0], [15.0, 0.0]])
    weight = LayerWeight(torch.tensor([[0.3, -0.7]]), torch.ones(()), 0)
    value = torch_ops.forward_product(Value(codes, form), weight, torch.tensor([1.0]), Linear(2, 1, True))
    np.testing.assert_allclose(value.tensor.numpy(), [[1 + 0.25 * (0.3 - 1.4)], [1 + 0.25 * 4.5]], rtol=1e-6)
