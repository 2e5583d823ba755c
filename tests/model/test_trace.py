"""Tracing: the graph computes what the module does, and says why when it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmpq.model import graph as g
from fedmpq.model import zoo
from fedmpq.model.dropout import Dropout
from fedmpq.model.module_input import as_taken
from fedmpq.model.module_state import initial_state, load_state
from fedmpq.model.quantizers import check_quantizers
from fedmpq.model.trace import TraceError, trace
from tests.functions import TORCH

torch = pytest.importorskip("torch")
nn = torch.nn
functional = torch.nn.functional


def traced(module: Any, shape: tuple[int, ...] = (3, 8, 8), bits: int | None = None) -> g.Graph:
    example = torch.zeros(1, *shape)
    return trace(module, example, name="net", activation_bits=bits, input_scale=0.1, input_zero_point=7)


class Forward(nn.Module):  # type: ignore[misc, name-defined]
    """Convolution, then what the test wants, then a classifier of fitting width."""

    def __init__(self, function: Callable[..., Any], features: int = 4, **parts: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(features, 2)
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.fc(functional.adaptive_avg_pool2d(self.function(self, self.stem(x)), 1).flatten(1))


def batch_norm(op: g.BatchNorm, x: Any, of: Callable[[str], Any]) -> Any:
    mean, variance = of("running_mean"), of("running_var")
    return functional.batch_norm(x, mean, variance, of("weight"), of("bias"), eps=op.eps)


# An independent reading of the attributes: (op, input, its own tensors by name) to output.
FLOAT: dict[type[g.Op], Callable[..., Any]] = {
    g.Conv2d: lambda op, x, of: functional.conv2d(
        x, of("weight"), of("bias"), op.stride, op.padding, op.dilation, op.groups
    ),
    g.Linear: lambda op, x, of: functional.linear(x, of("weight"), of("bias")),
    g.BatchNorm: batch_norm,
    g.Relu: lambda op, x, of: x.clamp(0, op.maximum or None),
    g.Quantize: lambda op, x, of: x,
    g.Add: lambda op, x, of, other: x + other,
    g.MaxPool: lambda op, x, of: functional.max_pool2d(
        x, op.kernel, op.stride, op.padding, ceil_mode=op.ceil_mode
    ),
    g.Concat: lambda op, x, of, *others: torch.cat((x, *others), 1),
    g.Slice: lambda op, x, of: x[:, op.start : op.stop],
    g.ChannelShuffle: lambda op, x, of: functional.channel_shuffle(x, op.groups),
    g.AvgPool: lambda op, x, of: functional.avg_pool2d(x, op.kernel, op.stride, op.padding),
    g.GlobalAvgPool: lambda op, x, of: x.mean((2, 3), keepdim=True),
    g.Flatten: lambda op, x, of: x.reshape(len(x), -1),
    g.Mul: lambda op, x, of, other: x * other,
    g.Lookup: lambda op, x, of: TORCH[op.function](x, op.parameter),
}


def run(graph: g.Graph, weights: dict[str, Any], side: dict[str, Any], image: Any) -> dict[str, Any]:
    """Every value of the graph in floating point, quantizers left out."""
    arrays = {f"{name}.weight": array for name, array in weights.items()} | side
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    values = {g.INPUT: image}
    for node in graph.nodes:
        x, *others = (values[name] for name in node.inputs)
        path = node.name
        values[path] = FLOAT[type(node.op)](
            node.op, x, lambda part, path=path: tensors.get(f"{path}.{part}"), *others
        )
    return values


def assert_computes(module: Any, graph: g.Graph) -> None:
    """The graph gives the module's output, and every shape is the one inferred."""
    image = torch.randn(2, *graph.input.shape)
    module.eval()
    with torch.no_grad():
        values = run(graph, *initial_state(module, graph), image)
        torch.testing.assert_close(values[graph.output], module(as_taken(module, image)))
    assert {name: tuple(value.shape[1:]) for name, value in values.items()} == graph.shapes


def randomize(module: Any) -> None:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
            for tensor in (part.weight, part.bias, part.running_mean, part.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)


SIZES = {
    "digits_cnn": (1, 8, 8),
    "resnet8": (1, 14, 14),
    "ds_cnn": (1, 49, 10),
    "autoencoder": (40, 1, 1),
    "inertial_cnn": (6, 1, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_zoo_models_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    shape = SIZES.get(name, (3, 32, 32))
    outputs = math.prod(shape) if name == "autoencoder" else 10
    module = zoo.build(name, classes=outputs, channels=shape[0])
    randomize(module)
    graph = traced(module, as_taken(module, torch.zeros(1, *shape)).shape[1:], bits=4)
    check_quantizers(graph)
    assert graph.shapes[graph.output] == (outputs,)
    assert sum(graph.layer_sizes) == sum(p.numel() for p in module.parameters() if p.ndim > 1)
    assert_computes(module, graph)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Any, tuple[int, int, int]]:
    """Random stacks of convolutions and pools."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    shape = draw(st.sampled_from([(2, 9, 12), (4, 11, 7)]))
    channels = shape[0]
    layers: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        kernel, stride = pair(1, 3), pair(1, 3)
        if draw(st.booleans()):
            groups = draw(st.sampled_from([n for n in (1, 2, channels) if channels % n == 0]))
            out, padding, dilation = groups * draw(st.integers(1, 3)), pair(0, 2), pair(1, 2)
            layers.append(
                nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))
            )
            channels = out
        else:
            padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
            layers.append(nn.MaxPool2d(kernel, stride, padding))
            if draw(st.booleans()):
                layers[-1] = nn.AvgPool2d(kernel, stride, padding)
    layers += [nn.Flatten()]
    try:
        features = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
    except RuntimeError:
        assume(False)
    return nn.Sequential(*layers, nn.Linear(features, 3)), shape


@pytest.mark.slow
@settings(max_examples=30)
@given(stacks())
def test_random_stacks_compute_the_same(stack: tuple[Any, tuple[int, int, int]]) -> None:
    module, shape = stack
    assert_computes(module, traced(module, shape))


def test_names_attributes_and_quantizers() -> None:
    module = zoo.build("resnet8", classes=5, channels=2)
    graph = traced(module, (2, 14, 14), bits=3)
    conv = graph.by_name["layer2.0.conv1"]
    assert conv.op == g.Conv2d(16, 32, (3, 3), (2, 2), (1, 1), (1, 1), groups=1, bias=False)
    assert graph.by_name["layer2.0.shortcut.0"].op.kernel == (1, 1)  # type: ignore[union-attr]
    assert graph.by_name["layer2.0.bn1"].op == g.BatchNorm(32, 1e-5, 0.1)
    assert graph.by_name["relu_3.quantized"].op == g.Quantize(3, signed=False)
    assert graph.by_name["fc"].op == g.Linear(64, 5, bias=True)
    assert graph.input == g.Input(2, 14, 14, float(np.float32(0.1)), 7)
    assert g.Graph.from_bytes(graph.to_bytes()) == graph


def test_the_module_is_left_as_it_was() -> None:
    module = zoo.build("digits_cnn", classes=10, channels=1).train()
    module.get_submodule("bn1").eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    traced(module, (1, 8, 8))
    modes = {name for name, part in module.named_modules() if not part.training}
    assert modes == {"bn1"}
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def bn() -> Any:
    return nn.BatchNorm2d(4)


SAME: dict[str, Callable[[], Any]] = {
    "in place": lambda: Forward(lambda m, x: x.relu_()),
    "in place, old name read": lambda: Forward(lambda m, x: (x.relu_(), x)[1]),
    "in-place add": lambda: Forward(lambda m, x: torch.relu(x).add_(m.c(x)), c=nn.Conv2d(4, 4, 1)),
    "relu6": lambda: Forward(lambda m, x: functional.relu6(x)),
    "relu6 module in place": lambda: Forward(lambda m, x: m.a(x), a=nn.ReLU6(inplace=True)),
    "hardtanh": lambda: Forward(lambda m, x: m.a(x), a=nn.Hardtanh(0, 6)),
    "hardtanh at 1": lambda: Forward(lambda m, x: m.a(x), a=nn.Hardtanh(0, 1)),
    "same": lambda: Forward(lambda m, x: m.c(x), c=nn.Conv2d(4, 4, (3, 5), padding="same", dilation=(2, 1))),
    "valid": lambda: Forward(lambda m, x: m.c(x), c=nn.Conv2d(4, 4, 3, padding="valid", stride=2)),
    "dropout": lambda: Forward(lambda m, x: m.c(m.d(x)), d=nn.Dropout(0.9), c=nn.Conv2d(4, 4, 1)),
    "dropout of channels": lambda: Forward(
        lambda m, x: m.c(m.d(x)), d=nn.Dropout2d(0.9), c=nn.Conv2d(4, 4, 1)
    ),
    "no-ops": lambda: Forward(lambda m, x: x.contiguous().clone().detach()),
    "default stride": lambda: Forward(lambda m, x: functional.avg_pool2d(functional.max_pool2d(x, 2), 2)),
    "pool before relu": lambda: Forward(lambda m, x: torch.relu(functional.max_pool2d(x, 2))),
    "mean": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Mean(False), nn.Linear(4, 2)),
    "mean kept": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Mean(True), nn.Flatten(), nn.Linear(4, 2)),
    "view": lambda: Reshaped(lambda x: x.view(x.size(0), -1)),
    "reshape": lambda: Reshaped(lambda x: x.reshape(len(x), -1)),
    "reshape from behind": lambda: Reshaped(lambda x: torch.reshape(x, (-1, 192))),
    "flat twice": lambda: Reshaped(lambda x: x.flatten(1).flatten(1)),
    "norm of a linear layer": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
    ),
    "one ReLU twice": lambda: Forward(
        lambda m, x: m.a(m.n(m.c(m.a(x)))), a=nn.ReLU(), c=nn.Conv2d(4, 4, 1), n=bn()
    ),
    "unused": lambda: Forward(lambda m, x: (m.c(x), x)[1], c=nn.Conv2d(4, 4, 1)),
    "layer called as a call": lambda: Forward(lambda m, x: m.relu(torch.relu(x)), relu=nn.Conv2d(4, 4, 1)),
    "functions": lambda: Forward(
        lambda m, x: m.f(x),
        f=nn.Sequential(nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.Tanh(), nn.Sigmoid()),
    ),
    "functions in place": lambda: Forward(
        lambda m, x: m.f(x), f=nn.Sequential(nn.SiLU(True), nn.Hardswish(True), nn.LeakyReLU(0.3, True))
    ),
    "functions with parameters": lambda: Forward(
        lambda m, x: m.f(x),
        f=nn.Sequential(nn.LeakyReLU(), nn.ELU(0.5), nn.GELU(), nn.GELU("tanh"), nn.ELU()),
    ),
    "dropout in place": lambda: Forward(
        lambda m, x: m.c(m.d(x)), d=nn.Dropout(0.9, inplace=True), c=nn.Conv2d(4, 4, 1)
    ),
    "product": lambda: Forward(lambda m, x: m.c(x) * x, c=nn.Conv2d(4, 4, 1)),
    "gate": lambda: Forward(lambda m, x: torch.sigmoid(functional.adaptive_avg_pool2d(x, 1)) * x),
    "gate behind": lambda: Forward(lambda m, x: x * x.mean((2, 3), keepdim=True)),
    "product in place": lambda: Forward(lambda m, x: m.c(x).mul_(x), c=nn.Conv2d(4, 4, 1)),
    "x + x": lambda: Forward(lambda m, x: x + x),
}


class Mean(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: Any) -> Any:
        return x.mean((-1, -2), keepdim=self.keep)


class Reshaped(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(192, 2)

    def forward(self, x: Any) -> Any:
        return self.fc(self.function(x))


@pytest.mark.parametrize("case", SAME)
def test_supported_forms_compute_the_same(case: str) -> None:
    torch.manual_seed(0)
    module = SAME[case]()
    randomize(module)
    assert_computes(module, traced(module))


def shared_weight() -> Any:
    module = Forward(lambda m, x: m.b(m.a(x)), a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1))
    module.a.weight = module.b.weight
    return module


def shared_memory() -> Any:
    module = shared_weight()
    module.a.weight = nn.Parameter(module.b.weight.detach())
    return module


def buffer_weight() -> Any:
    module = Forward(lambda m, x: functional.conv2d(x, m.kernel))
    module.register_buffer("kernel", torch.zeros(4, 4, 1, 1))
    return module


def odd_parameter() -> Any:
    module = Forward(lambda m, x: functional.conv2d(x, m.kernel))
    module.kernel = nn.Parameter(torch.zeros(4, 4, 1, 1))
    return module


def constant() -> Any:
    module = Forward(lambda m, x: x + m.offset)
    module.register_buffer("offset", torch.zeros(1))
    return module


def stale_view(module: Any, x: Any) -> Any:
    view = x.view(x.shape)
    x.relu_()
    return view


def branching(module: Any, x: Any) -> Any:
    return x if x.sum() > 0 else torch.relu(x)


def plain(function: Callable[..., Any], **parts: Any) -> Callable[[], Any]:
    return lambda: Forward(function, **parts)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "logarithm": (plain(lambda m, x: torch.log(x)), r"aten.log.default in the forward of Forward"),
    "module": (plain(lambda m, x: m.act(x), act=nn.Mish()), r"aten.mish.default in module 'act' is not"),
    "nested module": (
        plain(lambda m, x: m.a(x), a=nn.Sequential(nn.ReLU(), nn.Sequential(nn.Softplus()))),
        r"aten.softplus.default in module 'a.1.0' is not supported; supported are aten.conv2d",
    ),
    "negative slope": (
        plain(lambda m, x: m.act(x), act=nn.LeakyReLU(-0.5)),
        r"aten.leaky_relu.default in module 'act' has negative_slope=-0.5; it must not be negative",
    ),
    "scaled ELU": (plain(lambda m, x: functional.selu(x)), "selu"),
    "product with a number": (plain(lambda m, x: x * 2), "multiplies by the number 2"),
    "product over channels": (
        plain(lambda m, x: x * m.c(x), c=nn.Conv2d(4, 1, 1)),
        r"multiplies shapes \(2, 4, 8, 8\) and \(2, 1, 8, 8\)",
    ),
    "concat": (plain(lambda m, x: torch.cat([x, x], 2)), r"aten.cat.default in the forward"),
    "norm not affine": (
        plain(lambda m, x: m.n(x), n=nn.BatchNorm2d(4, affine=False)),
        "'n' has no weight and bias",
    ),
    "norm without statistics": (
        plain(lambda m, x: m.n(x), n=nn.BatchNorm2d(4, track_running_stats=False)),
        "has no running_mean and running_var",
    ),
    "norm without momentum": (
        plain(lambda m, x: m.n(x), n=nn.BatchNorm2d(4, momentum=None)),
        "momentum=None",
    ),
    "norm in training": (
        plain(
            lambda m, x: functional.batch_norm(x, m.n.running_mean, m.n.running_var, training=True), n=bn()
        ),
        "has no weight and bias",
    ),
    "shared weight": (shared_weight, "has a shared weight: a.weight, b.weight"),
    "shared memory": (shared_memory, "has a shared weight: a.weight, b.weight"),
    "layer twice": (plain(lambda m, x: m.c(m.c(x)), c=nn.Conv2d(4, 4, 1)), "the weight of 'c' a second time"),
    "weight a buffer": (buffer_weight, "has a weight that is no parameter"),
    "weight computed": (plain(lambda m, x: functional.conv2d(x, torch.ones(4, 4, 1, 1))), "aten"),
    "weight without a layer": (odd_parameter, "has a weight called 'kernel'"),
    "weight of another": (
        plain(lambda m, x: functional.conv2d(x, m.c.weight, m.stem.bias), c=nn.Conv2d(4, 4, 1)),
        "several modules: c, stem",
    ),
    "dilated pool": (plain(lambda m, x: m.p(x), p=nn.MaxPool2d(2, dilation=2)), "'p' has dilation"),
    "divisor": (plain(lambda m, x: m.p(x), p=nn.AvgPool2d(2, divisor_override=3)), "divisor_override"),
    "adaptive maximum": (plain(lambda m, x: m.p(x), p=nn.AdaptiveMaxPool2d(3)), "must divide them"),
    "transposed": (plain(lambda m, x: x.transpose(2, 3)), "exchanges axes"),
    "upsampled by halves": (plain(lambda m, x: m.u(x), u=nn.Upsample(scale_factor=1.5)), "whole factors"),
    "padded by ones": (plain(lambda m, x: m.p(x), p=nn.ConstantPad2d(1, 1.0)), "only zeros"),
    "cropped": (plain(lambda m, x: functional.pad(x, (-1, 0))), "only zeros"),
    "rows cut": (plain(lambda m, x: x[:, :, 1:]), "cuts dimension 2"),
    "circular": (
        plain(lambda m, x: m.c(x), c=nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
        r"aten.pad.default in module 'c'",
    ),
    "uneven padding": (plain(lambda m, x: m.c(x), c=nn.Conv2d(4, 4, 2, padding="same")), "unevenly"),
    "add a number": (plain(lambda m, x: x + 1), "aten.add.Tensor in the forward of Forward reads 1, which"),
    "add a buffer": (constant, "reads b_offset, which is not computed from the image"),
    "add times 2": (plain(lambda m, x: torch.add(x, torch.relu(x), alpha=2)), "alpha=2"),
    "broadcast add": (plain(lambda m, x: x + functional.adaptive_avg_pool2d(x, 1)), "must be equal"),
    "mean of channels": (plain(lambda m, x: x.mean(2, keepdim=True)), "averages dimensions"),
    "reshape": (plain(lambda m, x: x.view(len(x), 4, 64, 1)), r"turns shape \(2, 4, 8, 8\) into"),
    "view of bits": (plain(lambda m, x: x.view(torch.int32).view(torch.float32)), "aten.view.dtype"),
    "batch mixed up": (lambda: Reshaped(lambda x: x.reshape(1, -1)[:, :192]), "aten.reshape.default"),
    "dropout for ever": (plain(lambda m, x: functional.dropout(x)), "drops values in evaluation too"),
    "other hardtanh": (plain(lambda m, x: m.h(x), h=nn.Hardtanh()), "'h' cuts at -1"),
    "stale view": (plain(stale_view), "relu.* changed in place"),
    "two outputs": (lambda: TwoOutputs(), "must return one tensor"),
    "dictionary": (lambda: InDictionary(), "must return one tensor"),
    "two inputs": (lambda: TwoInputs(), "torch.export cannot record 'net'.*one image tensor"),
    "branches": (plain(branching), "torch.export cannot record 'net'.*not branch"),
    "reserved name": (plain(lambda m, x: m.input(x), input=nn.Conv2d(4, 4, 1)), "reserved name 'input'"),
    "linear on an image": (plain(lambda m, x: m.l(x), l=nn.Linear(8, 8)), "flatten to"),
    "bare layer": (lambda: nn.Conv2d(3, 4, 1), "has a weight called 'weight'"),
}


class TwoOutputs(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return torch.relu(x), x.flatten(1)


class InDictionary(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return {"logits": torch.relu(x)}


class TwoInputs(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any, y: Any) -> Any:
        return x + y


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_can_hold_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(TraceError, match=message) as caught:
        traced(make())
    assert "\n" not in str(caught.value)


def test_the_example_must_be_a_batch_of_images() -> None:
    with pytest.raises(TraceError, match=r"shape \(8, 8\), needs"):
        trace(nn.Flatten(), torch.zeros(8, 8), name="net", input_scale=1.0, input_zero_point=0)


def test_state_round_trip() -> None:
    torch.manual_seed(1)
    source, target = (zoo.build("digits_cnn", classes=10, channels=1) for _ in range(2))
    randomize(source)
    graph = traced(source, (1, 8, 8), bits=4)
    target.bn1.num_batches_tracked.fill_(5)  # type: ignore[union-attr, operator]
    weights, side = initial_state(source, graph)
    assert list(weights) == [node.name for node in graph.layers]
    assert list(side) == list(graph.side_shapes())
    assert {array.dtype for array in (*weights.values(), *side.values())} == {np.dtype(np.float32)}
    load_state(target, graph, weights, side)
    for name, value in source.state_dict().items():
        expected = 5 if name == "bn1.num_batches_tracked" else value
        assert torch.equal(target.state_dict()[name], torch.as_tensor(expected)), name


def test_state_is_a_copy() -> None:
    module = zoo.build("digits_cnn", classes=10, channels=1)
    graph = traced(module, (1, 8, 8))
    weights, side = initial_state(module, graph)
    for array in (*weights.values(), *side.values()):
        array.fill(9)
    assert not any((value == 9).any() for value in module.state_dict().values())


def test_first_clips() -> None:
    module = Forward(
        lambda m, x: torch.relu(m.b(functional.relu6(x)) + functional.hardtanh(m.c(x), 0, 2)),
        b=nn.Conv2d(4, 4, 1),
        c=nn.Conv2d(4, 4, 1),
    )
    graph = traced(module, bits=4)
    _, side = initial_state(module, graph)
    clips = {
        name.removesuffix(".quantized.clip"): float(side[name]) for name in side if name.endswith("clip")
    }
    assert clips == {"stem": 6.0, "relu6": 3.0, "b": 6.0, "hardtanh": 2.0, "relu": 4.0}
    assert side["relu.quantized.clip"].shape == ()


def test_state_must_fit() -> None:
    module = zoo.build("digits_cnn", classes=10, channels=1)
    graph = traced(module, (1, 8, 8))
    weights, side = initial_state(module, graph)
    with pytest.raises(g.GraphError, match=r"shape \(3,\) for 'fc.bias', the module has \(10,\)"):
        load_state(module, graph, weights, {**side, "fc.bias": np.zeros(3, np.float32)})
    del weights["conv1"]
    with pytest.raises(g.GraphError, match=r"nothing for 'conv1.weight'"):
        load_state(module, graph, weights, side)
    other = zoo.build("digits_cnn", classes=7, channels=1)
    with pytest.raises(g.GraphError, match=r"'fc.weight' has shape \(7, 32\) in the module"):
        initial_state(other, graph)
    with pytest.raises(g.GraphError, match=r"the module has no 'conv1\.weight'"):
        initial_state(nn.Flatten(), graph)


def dropping(*layers: Any) -> dict[str, Dropout | None]:
    image = torch.zeros(1, 3, 8, 8)
    graph = trace(nn.Sequential(*layers), image, name="net", input_scale=0.1, input_zero_point=7)
    return {node.name: node.dropout for node in graph.layers}


def test_layers_drop_what_they_read() -> None:
    found = dropping(
        nn.Dropout(0.25),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Dropout2d(0.5),
        nn.Conv2d(4, 4, 3),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(64, 5),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(5, 2),
    )
    assert found == {"1": Dropout(0.25), "4": Dropout(0.5, True), "8": Dropout(0.75), "11": None}


def test_a_dropout_that_no_layer_reads_is_named() -> None:
    with pytest.warns(UserWarning, match=r"relu.*reads what a dropout gives: training will drop nothing"):
        found = dropping(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    assert not any(found.values())


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((nn.Dropout(1.0), nn.Flatten()), "use a rate below 1"),
        ((nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Flatten()), "use one dropout of the two"),
    ],
)
def test_a_dropout_that_cannot_be_is_refused(layers: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        dropping(*layers, nn.Linear(192, 2))
