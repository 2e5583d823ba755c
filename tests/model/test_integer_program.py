"""Compiling: what is folded where, and which states are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
from fedmpq.model.integer_forward import logits, trace_values
from fedmpq.model.integer_program import (
    MAX_BIAS,
    Accumulate,
    AddCodes,
    Dequantize,
    QuantizeReal,
    Requantize,
    compile_program,
)
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.quantizers import place_quantizers
from fedmpq.model.shape_steps import FlattenCodes, PoolAverage
from fedmpq.model.state_checks import ProgramError, check_state

IMAGE = Input(channels=2, height=6, width=6, scale=0.5, zero_point=100)
CONV = Conv2d(2, 2, (3, 3), (1, 1), (1, 1), (1, 1), groups=1, bias=False)
NORM = BatchNorm(2, 1e-5, 0.1)


def graph_of(*nodes: tuple[Any, ...], image: Input = IMAGE) -> Graph:
    made = tuple(Node(name, op, tuple(inputs)) for name, op, *inputs in nodes)
    return Graph("net", image, made, made[-1].name)


def headed(*nodes: tuple[Any, ...]) -> Graph:
    head: list[tuple[str, Op, str]] = [
        ("mean", GlobalAvgPool(), nodes[-1][0]),
        ("flat", Flatten(), "mean"),
        ("fc", Linear(2, 3, bias=True), "flat"),
    ]
    return graph_of(*nodes, *head)


def residual() -> Graph:
    return headed(
        ("conv", CONV, INPUT),
        ("norm", NORM, "conv"),
        ("relu", Relu(6.0), "norm"),
        ("sum", Add(), "norm", "relu"),
        ("out", Relu(0.0), "sum"),
    )


def state_of(graph: Graph, seed: int = 0) -> tuple[Layers, Side]:
    random = np.random.default_rng(seed)
    layers = {
        node.name: QuantizedLayer.from_weights(
            random.normal(size=graph.weight_shape(node.name)).astype(np.float32), 4, "max", True
        )
        for node in graph.layers
    }
    side = {
        name: np.asarray(random.uniform(0.5, 2, shape), np.float32)
        for name, shape in graph.side_shapes().items()
    }
    return layers, side


PLACED = place_quantizers(residual(), 4)


def test_steps_come_in_order_and_each_accumulator_once() -> None:
    program = compile_program(PLACED, *state_of(PLACED))
    kinds = [(type(step), step.output) for step in program.steps]
    assert kinds == [
        (Accumulate, "norm"),
        (Requantize, "norm.quantized"),
        (Requantize, "relu.quantized"),
        (AddCodes, "sum"),
        (QuantizeReal, "out.quantized"),
        (PoolAverage, "mean"),
        (FlattenCodes, "flat"),
        (Accumulate, "fc"),
        (Dequantize, "fc.logits"),
    ]
    assert program.output == "fc.logits"
    codes = {INPUT, "norm.quantized", "relu.quantized", "out.quantized", "mean", "flat"}
    assert program.formats.keys() == codes


def test_batch_norm_folds_into_scale_and_bias() -> None:
    layers, side = state_of(PLACED)
    step = compile_program(PLACED, layers, side).steps[0]
    assert isinstance(step, Accumulate)
    np.testing.assert_array_equal(step.weight, layers["conv"].integer_weights())
    factor = side["norm.weight"] / np.sqrt(side["norm.running_var"] + 1e-5)
    offset = side["norm.bias"] - side["norm.running_mean"] * factor
    np.testing.assert_allclose(step.scale, 0.5 * layers["conv"].step / 2 * factor, rtol=1e-6)
    np.testing.assert_allclose(step.bias, offset / step.scale, atol=0.5001)
    assert step.bias.dtype == np.int32


def test_a_relu6_bounds_the_clip() -> None:
    layers, side = state_of(PLACED)
    side["relu.quantized.clip"] = np.array(50, np.float32)
    formats = compile_program(PLACED, layers, side).formats
    assert formats["relu.quantized"].scale == np.float32(6) / np.float32(15)


def test_a_tiny_scale_does_not_overflow_the_bias() -> None:
    layers, side = state_of(PLACED)
    side["norm.weight"] = np.array([0, -1e-20], np.float32)
    side["norm.bias"] = np.array([3, -5], np.float32)
    step = compile_program(PLACED, layers, side).steps[0]
    assert isinstance(step, Accumulate)
    assert step.bias.tolist() == [2**30, 2**30]
    np.testing.assert_array_equal(step.scale, np.array([3, -5], np.float32) / np.float32(MAX_BIAS))
    side["norm.bias"] = side["norm.running_mean"] = np.zeros(2, np.float32)
    step = compile_program(PLACED, layers, side).steps[0]
    assert isinstance(step, Accumulate)
    assert step.bias.tolist() == [0, 0]
    assert (np.abs(step.scale) > 0).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_longest_sum_and_its_bias_fit_an_int32(sign: int) -> None:
    image = Input(channels=1, height=256, width=256, scale=1.0, zero_point=0)
    graph = graph_of(
        ("flat", Flatten(), INPUT),
        ("fc", Linear(65536, 1, bias=True), "flat"),
        image=image,
    )
    codes = np.full((1, 65536), 128 + sign * 127, np.uint8)
    layers = {"fc": QuantizedLayer(codes, 8, np.array(2.0**-29, np.float32))}
    program = compile_program(graph, layers, {"fc.bias": np.array([sign * 100.0], np.float32)})
    white = np.full((1, 256, 256, 1), 255, np.uint8)
    acc = 65536 * 255 * 127 * sign
    step = program.steps[1]
    assert isinstance(step, Accumulate)
    assert step.bias.tolist() == [sign * 2**24]
    assert trace_values(program, white)["fc"].tolist() == [[acc + sign * 2**24]]
    expected = np.float32(acc + sign * 2**24) * (np.float32(100) / np.float32(2**24))
    assert logits(program, white).tolist() == [[float(expected)]]


def changed_layer(name: str, **fields: Any) -> Callable[[Layers, Side], None]:
    def change(layers: Layers, side: Side) -> None:
        layers[name] = replace(layers[name], **fields)

    return change


def without(name: str) -> Callable[[Layers, Side], None]:
    def change(layers: Layers, side: Side) -> None:
        (layers if name in layers else side).pop(name)

    return change


def with_side(name: str, value: Any, dtype: type = np.float32) -> Callable[[Layers, Side], None]:
    def change(layers: Layers, side: Side) -> None:
        side[name] = np.asarray(value, dtype)

    return change


def renamed_layer(layers: Layers, side: Side) -> None:
    layers["conv2"] = layers["conv"]


CODES = np.full((2, 2, 3, 3), 7, np.uint8)
WRONG: dict[str, tuple[Callable[[Layers, Side], None], str]] = {
    "missing layer": (without("conv"), "layer 'conv' is missing"),
    "unknown layer": (renamed_layer, "layer 'conv2' is not in the graph"),
    "codes of another shape": (
        changed_layer("conv", codes=CODES[:, :1]),
        r"layer 'conv': codes of shape \(2, 1, 3, 3\), the graph says \(2, 2, 3, 3\)",
    ),
    "codes of another type": (
        changed_layer("conv", codes=CODES.astype(np.int8)),
        "layer 'conv': codes of int8, needs uint8",
    ),
    "codes too large": (
        changed_layer("conv", codes=CODES + np.uint8(9)),
        r"'conv' has codes 16\.\.16.* 0\.\.15",
    ),
    "code 0 at 8 bits": (
        changed_layer("conv", codes=CODES - np.uint8(7), bits=8),
        r"'conv' has codes 0\.\.0, at 8 bits they lie in 1\.\.255",
    ),
    "no bits": (changed_layer("conv", bits=0), r"'conv' has 0 bits, must have 1\.\.8"),
    "nine bits": (changed_layer("conv", bits=9), "'conv' has 9 bits"),
    "steps of another shape": (
        changed_layer("conv", step=np.ones(3, np.float32)),
        r"layer 'conv': step of shape \(3,\), the graph says \(\) or \(2,\)",
    ),
    "steps of another type": (changed_layer("conv", step=np.ones(2)), "'conv': step of float64"),
    "step not a number": (
        changed_layer("conv", step=np.array([1, np.nan], np.float32)),
        "'conv': step must be positive",
    ),
    "step zero": (changed_layer("conv", step=np.zeros((), np.float32)), "'conv': step must be positive"),
    "step infinite": (
        changed_layer("conv", step=np.array(np.inf, np.float32)),
        "'conv': step must be positive and finite",
    ),
    "missing side tensor": (without("norm.running_var"), "side tensor 'norm.running_var' is missing"),
    "missing clip": (without("out.quantized.clip"), "side tensor 'out.quantized.clip' is missing"),
    "unknown side tensor": (with_side("conv.bias", [1, 2]), "side tensor 'conv.bias' is not in the graph"),
    "side tensor of another shape": (
        with_side("norm.weight", [1, 2, 3]),
        r"side tensor 'norm.weight' of shape \(3,\), the graph says \(2,\)",
    ),
    "clip with an axis": (with_side("norm.quantized.clip", [1]), r"'norm.quantized.clip' of shape \(1,\)"),
    "side tensor of another type": (
        with_side("fc.bias", [1, 2, 3], np.float64),
        "side tensor 'fc.bias' of float64, needs float32",
    ),
    "side tensor not a number": (
        with_side("norm.running_mean", [0, np.nan]),
        "side tensor 'norm.running_mean' has NaN",
    ),
    "side tensor infinite": (
        with_side("fc.bias", [0, np.inf, 1]),
        "side tensor 'fc.bias' has NaN or infinity",
    ),
    "clip not a number": (with_side("relu.quantized.clip", np.nan), "'relu.quantized.clip' has NaN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_state_is_named(name: str) -> None:
    change, message = WRONG[name]
    layers, side = state_of(PLACED)
    check_state(PLACED, layers, side)
    change(layers, side)
    with pytest.raises(ProgramError, match=message):
        check_state(PLACED, layers, side)
    with pytest.raises(ProgramError, match=message):
        compile_program(PLACED, layers, side)


OVERFLOWING: dict[str, dict[str, Any]] = {
    "scale": {"norm.weight": [3e38, 1]},
    "offset": {"norm.weight": [1e20, 1], "norm.running_mean": [1e30, 0]},
    "multiplier": {"norm.weight": [1e37, 1], "norm.quantized.clip": 1e-3},
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_scales_that_overflow_are_named(name: str) -> None:
    """All finite, so far: the product is not."""
    layers, side = state_of(PLACED)
    layers["conv"] = replace(layers["conv"], step=np.array(4e3, np.float32))
    side |= {tensor: np.asarray(value, np.float32) for tensor, value in OVERFLOWING[name].items()}
    check_state(PLACED, layers, side)
    with pytest.raises(ProgramError, match=r"the scales of 'norm(\.quantized)?' overflow float32"):
        compile_program(PLACED, layers, side)


def test_logits_that_overflow_are_named() -> None:
    layers, side = state_of(PLACED)
    layers["fc"] = replace(layers["fc"], step=np.array(3e38, np.float32))
    side["out.quantized.clip"] = np.array(1e3, np.float32)
    with pytest.raises(ProgramError, match="the scales of 'fc' overflow float32"):
        compile_program(PLACED, layers, side)


def test_a_variance_of_zero_and_an_eps_that_vanishes() -> None:
    nodes = [replace(node, op=replace(NORM, eps=1e-60)) if node.op == NORM else node for node in PLACED.nodes]
    graph = replace(PLACED, nodes=tuple(nodes))
    layers, side = state_of(graph)
    side["norm.running_var"] = np.zeros(2, np.float32)
    with pytest.raises(ProgramError, match="the scales of 'norm' overflow"):
        compile_program(graph, layers, side)


def test_a_variance_below_zero_counts_as_zero() -> None:
    layers, side = state_of(PLACED)
    side["norm.running_var"] = np.zeros(2, np.float32)
    zero = compile_program(PLACED, layers, side)
    side["norm.running_var"] = np.array([-1e-9, -1], np.float32)
    below = compile_program(PLACED, layers, side)
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 2), dtype=np.uint8)
    np.testing.assert_array_equal(logits(below, images), logits(zero, images))


POOL = AvgPool((2, 2), (2, 2), (0, 0))
UNFIT: dict[str, tuple[Callable[[], Graph], str]] = {
    "not quantized": (residual, "'sum' reads 'norm', which is not quantized; pass"),
    "mean of the image": (
        lambda: headed(("pool", POOL, INPUT)),
        "'pool' averages the input image; put a convolution before it",
    ),
    "mean of a pooled image": (
        lambda: headed(("max", MaxPool((2, 2), (1, 1), (0, 0)), INPUT), ("pool", POOL, "max")),
        "'pool' averages the input image",
    ),
    "relu twice": (
        lambda: place_quantizers(
            headed(("conv", CONV, INPUT), ("relu", Relu(0.0), "conv"), ("again", Relu(6.0), "relu")), 4
        ),
        "ReLU 'again' directly follows another ReLU",
    ),
    "relu with a sign": (
        lambda: headed(
            ("conv", CONV, INPUT), ("relu", Relu(0.0), "conv"), ("codes", Quantize(8, signed=True), "relu")
        ),
        "'codes' quantizes a ReLU's output with a sign",
    ),
    "relu at the end": (
        lambda: graph_of(
            ("flat", Flatten(), INPUT), ("fc", Linear(72, 3, True), "flat"), ("relu", Relu(0.0), "fc")
        ),
        "the output 'relu' must be",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_graph_that_makes_no_program_is_named(name: str) -> None:
    make, message = UNFIT[name]
    graph = make()
    with pytest.raises(ProgramError, match=message):
        compile_program(graph, *state_of(graph))


def test_a_norm_of_real_values_that_are_no_layers_is_refused() -> None:
    graph = headed(("conv", CONV, INPUT), ("relu", Relu(0.0), "conv"), ("norm", NORM, "relu"))
    with pytest.raises(ProgramError, match="BatchNorm 'norm' reads 'relu', which is neither"):
        compile_program(graph, *state_of(graph))
