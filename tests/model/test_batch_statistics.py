"""Statistics moved without data, against networks that were run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedmpq.model.batch_statistics import quantized_statistics, unquantized_statistics
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
    Quantize,
    Relu,
    Size,
)
from fedmpq.model.quantized import QuantizedLayer, Side, Weights
from fedmpq.model.quantizers import place_quantizers

STATISTICS = ("running_mean", "running_var")


def conv(inputs: int, outputs: int, kernel: int = 3, **more: int) -> Conv2d:
    """A square convolution without a bias."""

    def both(name: str, default: int) -> Size:
        return (more.get(name, default),) * 2

    return Conv2d(
        inputs,
        outputs,
        (kernel, kernel),
        both("stride", 1),
        both("padding", 0),
        both("dilation", 1),
        more.get("groups", 1),
        False,
    )


# One layer


def one_layer(op: Conv2d, size: int) -> Graph:
    """BatchNorm, ReLU and clip in front of one layer with a BatchNorm of its own."""
    nodes = (
        Node("first", conv(1, op.in_channels, 1), (INPUT,)),
        Node("bn0", BatchNorm(op.in_channels, 1e-5, 0.125), ("first",)),
        Node("relu0", Relu(0.0), ("bn0",)),
        Node("layer", op, ("relu0",)),
        Node("bn", BatchNorm(op.out_channels, 1e-5, 0.125), ("layer",)),
        Node("relu", Relu(6.0), ("bn",)),
        Node("pool", GlobalAvgPool(), ("relu",)),
        Node("flat", Flatten(), ("pool",)),
        Node("fc", Linear(op.out_channels, 3, True), ("flat",)),
    )
    return place_quantizers(Graph("one", Input(1, size, size, 0.015625, 128), nodes, "fc"), 4)


def random_state(graph: Graph, seed: int) -> tuple[Weights, Side]:
    random = np.random.default_rng(seed)
    weights = {
        node.name: random.normal(0, 0.3, graph.weight_shape(node.name)).astype(np.float32)
        for node in graph.layers
    }
    side = {
        name: np.asarray(random.uniform(0.5, 1.5, shape), np.float32)
        for name, shape in graph.side_shapes().items()
    }
    return weights, side


def on_grid(weights: Weights, bits: int, per_channel: bool = False) -> Weights:
    return {
        name: QuantizedLayer.from_weights(tensor, bits, "least_error", per_channel).weights()
        for name, tensor in weights.items()
    }


def check_sound(graph: Graph, side: Side) -> None:
    assert {name: tensor.shape for name, tensor in side.items()} == graph.side_shapes()
    for name, tensor in side.items():
        assert tensor.dtype == np.float32, name
        assert np.isfinite(tensor).all(), name
        assert not name.endswith("running_var") or (tensor > 0).all(), name


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Conv2d, int]:
    groups = draw(st.integers(1, 3))
    kernel, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    op = conv(
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 3)),
        dilation=dilation,
        groups=groups,
    )
    size = draw(st.integers(1, 9))
    assume(size + 2 * op.padding[0] > dilation * (kernel - 1))
    return op, size


@settings(max_examples=60)
@given(geometries(), st.integers(0, 1000))
def test_the_mean_moves_as_the_sums_of_a_constant_image_do(geometry: tuple[Conv2d, int], seed: int) -> None:
    """BatchNorm's weights of zero make the layer's input constant, and the mean over an image exact."""
    op, size = geometry
    graph = one_layer(op, size)
    weights, side = random_state(graph, seed)
    side["bn0.weight"] = np.zeros_like(side["bn0.weight"])
    side["relu0.quantized.clip"] = np.asarray(1.25, np.float32)
    new = on_grid(weights, 2)
    image = torch.from_numpy(np.minimum(side["bn0.bias"], 1.25).astype(np.float64))
    image = image.reshape(1, -1, 1, 1).expand(1, -1, size, size)
    change = torch.from_numpy(new["layer"].astype(np.float64) - weights["layer"])
    sums = functional.conv2d(image, change, None, op.stride, op.padding, op.dilation, op.groups)
    moved = quantized_statistics(graph, weights, new, side)
    expected = side["bn.running_mean"] + sums.mean((0, 2, 3)).numpy()
    np.testing.assert_allclose(moved["bn.running_mean"], expected, rtol=1e-5, atol=1e-6)
    check_sound(graph, moved)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_of_independent_taps_the_variance_is_exact(seed: int, bits: int, per_channel: bool) -> None:
    """`sum W^2` becomes `sum Q^2` in the layer that reads the image, and no mean moves there."""
    graph = one_layer(conv(2, 4, padding=1), 6)
    weights, side = random_state(graph, seed)
    side["bn0.running_var"] = np.square(weights["first"]).sum((1, 2, 3))
    new = on_grid(weights, bits, per_channel)
    moved = quantized_statistics(graph, weights, new, side)
    np.testing.assert_allclose(moved["bn0.running_var"], np.square(new["first"]).sum((1, 2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(moved["bn0.running_mean"], side["bn0.running_mean"])


@given(st.integers(0, 10_000), st.floats(0.01, 100))
def test_a_filter_made_larger_has_its_variance_made_larger(seed: int, factor: float) -> None:
    """The whole measured variance goes with it, whatever the taps have in common."""
    graph = one_layer(conv(2, 4, padding=1), 6)
    weights, side = random_state(graph, seed)
    larger = {name: np.asarray(tensor * np.float32(factor)) for name, tensor in weights.items()}
    moved = quantized_statistics(graph, weights, larger, side)
    np.testing.assert_allclose(moved["bn.running_var"], side["bn.running_var"] * factor**2, rtol=1e-4)


def test_only_running_statistics_move_and_the_old_ones_are_left_alone() -> None:
    graph = one_layer(conv(2, 4, padding=1), 6)
    weights, side = random_state(graph, 0)
    before = {name: tensor.copy() for name, tensor in side.items()}
    moved = quantized_statistics(graph, weights, on_grid(weights, 2), side)
    for name, tensor in side.items():
        assert tensor.tobytes() == before[name].tobytes()
        moves = name.endswith(STATISTICS) and name != "bn0.running_mean"  # the image has mean zero
        assert (moved[name].tobytes() != tensor.tobytes()) == moves, name


# Whole networks


def network(width: int = 16) -> Graph:
    """Padding, stride, a depthwise layer, groups, dilation, both kinds of clip, a residual sum, pools."""
    nodes = (
        Node("stem", conv(3, width, padding=1), (INPUT,)),
        Node("stem_bn", BatchNorm(width, 1e-5, 0.125), ("stem",)),
        Node("stem_relu", Relu(0.0), ("stem_bn",)),
        Node("depth", conv(width, width, stride=2, padding=1, groups=width), ("stem_relu",)),
        Node("depth_bn", BatchNorm(width, 1e-5, 0.125), ("depth",)),
        Node("depth_relu", Relu(6.0), ("depth_bn",)),
        Node("wide", conv(width, width, padding=2, dilation=2), ("depth_relu",)),
        Node("wide_bn", BatchNorm(width, 1e-5, 0.125), ("wide",)),
        Node("short", conv(width, width, 1, stride=2), ("stem_relu",)),
        Node("short_bn", BatchNorm(width, 1e-5, 0.125), ("short",)),
        Node("sum", Add(), ("wide_bn", "short_bn")),
        Node("sum_relu", Relu(0.0), ("sum",)),
        Node("group", conv(width, width, padding=1, groups=4), ("sum_relu",)),
        Node("group_bn", BatchNorm(width, 1e-5, 0.125), ("group",)),
        Node("group_relu", Relu(0.0), ("group_bn",)),
        Node("pool", GlobalAvgPool(), ("group_relu",)),
        Node("flat", Flatten(), ("pool",)),
        Node("fc", Linear(width, 5, True), ("flat",)),
    )
    return place_quantizers(Graph("net", Input(3, 16, 16, 0.015625, 128), nodes, "fc"), 4)


def trained_state(graph: Graph, seed: int) -> tuple[Weights, Side]:
    """Weights and BatchNorm as training leaves them, its statistics still to be measured."""
    random = np.random.default_rng(seed)
    weights = {}
    for node in graph.layers:
        shape = graph.weight_shape(node.name)
        sizes = random.uniform(0.5, 1.5, (shape[0], *(1,) * (len(shape) - 1)))
        filters = random.normal(0, 1 / math.sqrt(math.prod(shape[1:])), shape)
        weights[node.name] = (sizes * filters).astype(np.float32)
    side: Side = {}
    for name, shape in graph.side_shapes().items():
        low, high = {"weight": (0.5, 1.5), "bias": (-0.5, 0.8), "clip": (2.0, 4.0)}.get(
            name.rpartition(".")[2], (1.0, 1.0)
        )
        side[name] = np.asarray(random.uniform(low, high, shape), np.float32)
    return weights, side


def measured(graph: Graph, weights: Weights, side: Side, images: Tensor) -> Side:
    """The side tensors with the statistics that every BatchNorm finds when these images go through.

    In real numbers, each BatchNorm dividing by what it finds, as in training.
    """
    found, values = dict(side), {INPUT: images}
    for node in graph.nodes:
        op, x = node.op, values[node.inputs[0]]
        if isinstance(op, Conv2d):
            weight = torch.from_numpy(weights[node.name])
            y = functional.conv2d(x, weight, None, op.stride, op.padding, op.dilation, op.groups)
        elif isinstance(op, BatchNorm):
            axes = (0, 2, 3)
            mean, variance = x.mean(axes), x.var(axes, correction=0)
            found[f"{node.name}.running_mean"] = mean.numpy()
            found[f"{node.name}.running_var"] = variance.numpy()
            gamma, beta = (torch.from_numpy(side[f"{node.name}.{part}"]) for part in ("weight", "bias"))
            y = functional.batch_norm(x, mean, variance, gamma, beta, False, 0.0, op.eps)
        elif isinstance(op, Relu):
            y = x.clamp(0, op.maximum or math.inf)
        elif isinstance(op, Quantize):
            highest = 2 ** (op.bits - 1) - 1 if op.signed else 2**op.bits - 1
            clip = float(side[f"{node.name}.clip"])
            y = (x.clamp(-clip if op.signed else 0, clip) * (highest / clip)).round() * (clip / highest)
        elif isinstance(op, Add):
            y = x + values[node.inputs[1]]
        else:
            break
        values[node.name] = y
    return found


def distance(one: Side, true: Side, norm: str) -> tuple[float, float]:
    """Root mean squares over one BatchNorm's channels: of the means' differences in true deviations, and of
    the logarithms of the variances' ratios."""
    mean, variance = (f"{norm}.{part}" for part in STATISTICS)
    shift = (one[mean] - true[mean]) / np.sqrt(true[variance])
    ratio = np.log(one[variance] / true[variance])
    return float(np.sqrt(np.mean(shift**2))), float(np.sqrt(np.mean(ratio**2)))


@pytest.mark.slow
def test_moved_statistics_are_near_those_of_the_quantized_network() -> None:
    graph = network()
    norms = [node.name for node in graph.nodes if isinstance(node.op, BatchNorm)]
    before: dict[str, list[tuple[float, float]]] = {norm: [] for norm in norms}
    after: dict[str, list[tuple[float, float]]] = {norm: [] for norm in norms}
    for seed in range(3):
        images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        weights, side = trained_state(graph, seed)
        side = measured(graph, weights, side, images)
        new = on_grid(weights, 2)
        true = measured(graph, new, side, images)
        moved = quantized_statistics(graph, weights, new, side)
        check_sound(graph, moved)
        for norm in norms:
            before[norm].append(distance(side, true, norm))
            after[norm].append(distance(moved, true, norm))
    for norm in norms:
        (old_mean, old_variance), (mean, variance) = (np.mean(each[norm], axis=0) for each in (before, after))
        assert variance < 0.5 * old_variance, norm
        # The image has mean zero: behind it no mean moves but by chance.
        assert mean < 0.2 * old_mean or norm == "stem_bn", norm


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_moving_back_and_on_again_gives_what_was_measured(bits: int) -> None:
    graph = network()
    weights, side = trained_state(graph, 3)
    images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    new = on_grid(weights, bits)
    found = measured(graph, new, side, images)
    back = unquantized_statistics(graph, weights, new, found)
    check_sound(graph, back)
    again = quantized_statistics(graph, weights, new, back)
    for name in found:
        np.testing.assert_allclose(again[name], found[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if bits == 2:
        norm = "stem_bn"
        whole = measured(graph, weights, side, images)
        assert distance(back, whole, norm)[1] < distance(found, whole, norm)[1], "it is nearer to W's own"


def test_less_than_the_noise_was_measured_and_still_it_is_sound() -> None:
    graph = network()
    weights, side = trained_state(graph, 5)
    tiny = {name: tensor * np.float32(1e-3 if name.endswith("var") else 1) for name, tensor in side.items()}
    check_sound(graph, unquantized_statistics(graph, weights, on_grid(weights, 1), tiny))


def test_equal_weights_leave_the_side_tensors_equal() -> None:
    graph = network()
    weights, side = trained_state(graph, 4)
    weights["group"][:5] = 0
    side["stem_bn.bias"][:] = -100  # so that nothing comes through
    same = {name: tensor.copy() for name, tensor in weights.items()}
    for name, tensor in quantized_statistics(graph, weights, same, side).items():
        np.testing.assert_allclose(tensor, side[name], rtol=1e-6, err_msg=name)


def test_a_layer_without_a_batch_norm_is_passed_over() -> None:
    nodes = (
        Node("bare", conv(1, 4, padding=1), (INPUT,)),
        Node("relu", Relu(0.0), ("bare",)),
        Node("pool", MaxPool((2, 2), (2, 2), (0, 0)), ("relu",)),
        Node("conv", conv(4, 6), ("pool",)),
        Node("bn", BatchNorm(6, 1e-5, 0.125), ("conv",)),
        Node("relu2", Relu(0.0), ("bn",)),
        Node("mean", AvgPool((2, 2), (2, 2), (0, 0)), ("relu2",)),
        Node("flat", Flatten(), ("mean",)),
        Node("hidden", Linear(6, 4, False), ("flat",)),
        Node("hidden_bn", BatchNorm(4, 1e-5, 0.125), ("hidden",)),
        Node("hidden_relu", Relu(0.0), ("hidden_bn",)),
        Node("fc", Linear(4, 3, True), ("hidden_relu",)),
    )
    graph = place_quantizers(Graph("bare", Input(1, 8, 8, 0.015625, 128), nodes, "fc"), 4)
    weights, side = random_state(graph, 2)
    moved = quantized_statistics(graph, weights, on_grid(weights, 1), side)
    check_sound(graph, moved)
    changed = {name for name in side if moved[name].tobytes() != side[name].tobytes()}
    assert changed == {f"{norm}.{part}" for norm in ("bn", "hidden_bn") for part in STATISTICS}
    # Its output is taken to be that of its own weights, so its rounding moves nothing behind it.
    only = quantized_statistics(graph, weights, weights | {"bare": on_grid(weights, 1)["bare"]}, side)
    for name, tensor in only.items():
        np.testing.assert_allclose(tensor, side[name], rtol=1e-6, err_msg=name)


def test_a_bias_moves_what_comes_behind_a_layer_without_a_batch_norm() -> None:
    op = Conv2d(1, 2, (1, 1), (1, 1), (0, 0), (1, 1), 1, True)
    nodes = (
        Node("bare", op, (INPUT,)),
        Node("conv", conv(2, 2, 1), ("bare",)),
        Node("bn", BatchNorm(2, 1e-5, 0.125), ("conv",)),
        Node("relu", Relu(0.0), ("bn",)),
        Node("flat", Flatten(), ("relu",)),
        Node("fc", Linear(8, 3, True), ("flat",)),
    )
    graph = place_quantizers(Graph("biased", Input(1, 2, 2, 0.015625, 128), nodes, "fc"), 4)
    weights, side = random_state(graph, 3)
    weights["bare"][:] = 1e-6  # so that its output is its bias
    side["bare.bias"] = np.array([-2.0, 3.0], np.float32)
    side["bare.quantized.clip"] = np.asarray(2.5, np.float32)
    new = weights | {"conv": on_grid(weights, 2)["conv"]}
    change = (new["conv"] - weights["conv"])[:, :, 0, 0]
    moved = quantized_statistics(graph, weights, new, side)
    expected = side["bn.running_mean"] + change @ np.array([-2.0, 2.5], np.float32)
    np.testing.assert_allclose(moved["bn.running_mean"], expected, rtol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_of_zero_give_sound_statistics(bits: int, per_channel: bool) -> None:
    graph = network()
    weights, side = trained_state(graph, 1)
    for name in ("stem", "depth", "short"):
        weights[name] = np.zeros_like(weights[name])
    weights["group"][3] = 0
    weights["wide"][2] = 1e-30
    check_sound(graph, quantized_statistics(graph, weights, on_grid(weights, bits, per_channel), side))
    everything = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
    check_sound(graph, quantized_statistics(graph, everything, on_grid(everything, bits, per_channel), side))
    check_sound(graph, unquantized_statistics(graph, weights, on_grid(weights, bits, per_channel), side))


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(-60, 60), st.floats(0, 20))
def test_one_channel_gives_sound_statistics(seed: int, bits: int, bias: float, gamma: float) -> None:
    graph = one_layer(conv(1, 1, padding=1), 4)
    weights, side = random_state(graph, seed)
    side["bn0.bias"][0], side["bn0.weight"][0] = bias, gamma
    check_sound(graph, quantized_statistics(graph, weights, on_grid(weights, bits), side))
