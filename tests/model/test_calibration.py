"""Measured statistics: of each layer over a batch, against floats; of several batches; of which images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.calibration import (
    CALIBRATION_SAMPLES,
    Images,
    MergedStatistics,
    calibration_batches,
    measure,
    statistics_names,
)
from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, GlobalAvgPool, Graph, Linear
from fedmpq.model.integer_forward import trace_values
from fedmpq.model.integer_program import compile_program
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.training.native_engine import NativeEngine
from tests.training.small_graphs import GRAPHS, Net, random_batch, random_state

MEAN, VARIANCE = "running_mean", "running_var"
DRAWS = Draws(1, 2, 3)


def one_norm(channels: int = 3, bias: bool = False) -> Graph:
    """A single BatchNorm, behind a convolution of the image."""
    net = Net(2, 5, 4)
    return net.graph(net.add(GlobalAvgPool(), net.conv(INPUT, channels, bias=bias)))


def images_of(graph: Graph, count: int, seed: int = 0) -> Images:
    return random_batch(graph, count, seed)[0]


def normalised_layers(graph: Graph) -> dict[str, str]:
    """What each BatchNorm reads: a layer or codes."""
    return {node.name: node.inputs[0] for node in graph.nodes if isinstance(node.op, BatchNorm)}


def real_outputs(
    graph: Graph, layers: Layers, side: Side, name: str, real: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What the layer gives for real inputs NHWC, one row for each pixel, in float64 by torch."""
    op = next((node.op for node in graph.layers if node.name == name), None)
    if op is None:  # a BatchNorm of codes normalises them as they are
        return real.reshape(-1, real.shape[-1])
    weights = torch.from_numpy(layers[name].weights().astype(np.float64))
    source = torch.from_numpy(real)
    if isinstance(op, Linear):
        found = source @ weights.t()
    else:
        assert isinstance(op, Conv2d)
        how = op.stride, op.padding, op.dilation, op.groups
        found = functional.conv2d(source.permute(0, 3, 1, 2), weights, None, *how).permute(0, 2, 3, 1)
    rows: NDArray[np.float64] = found.reshape(-1, len(weights)).numpy()
    return rows + side[f"{name}.bias"] if op.bias else rows


def of_the_image(graph: Graph, images: Images) -> NDArray[np.float64]:
    return (images.astype(np.float64) - graph.input.zero_point) * graph.input.scale


def assert_statistics(found: Side, norm: str, rows: NDArray[np.float64]) -> None:
    mean, variance = found[f"{norm}.{MEAN}"], found[f"{norm}.{VARIANCE}"]
    assert mean.dtype == variance.dtype == np.float32
    # The mean of numbers of either sign may be much smaller than they are.
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-5, atol=1e-6 * np.abs(rows).max())
    np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-5, atol=1e-10)


def assert_same(one: Side, other: Side) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert other[name].tobytes() == tensor.tobytes(), name


# One batch


@pytest.mark.parametrize("channels", [1, 3, 17])
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_first_layers_are_those_of_its_outputs(
    channels: int, count: int, bias: bool, per_channel: bool
) -> None:
    graph = one_norm(channels, bias=bias)
    layers, side = random_state(graph, bits=(3, 8), per_channel=per_channel)
    images = images_of(graph, count)
    found = measure(graph, layers, side, [images])
    ((norm, layer),) = normalised_layers(graph).items()
    assert tuple(found) == (f"{norm}.{MEAN}", f"{norm}.{VARIANCE}") == statistics_names(graph)
    assert_statistics(found, norm, real_outputs(graph, layers, side, layer, of_the_image(graph, images)))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_network_run_with_them_has_them(name: str, per_channel: bool) -> None:
    """Every layer of the integer forward gives, over the batch, what its BatchNorm was told."""
    graph = GRAPHS[name]()
    layers, side = random_state(graph, per_channel=per_channel)
    images = images_of(graph, 6)
    found = measure(graph, layers, side, [images])
    assert sorted(found) == sorted(statistics_names(graph))
    assert all(found[each].shape == side[each].shape for each in found)
    program = compile_program(graph, layers, {**side, **found})
    values = trace_values(program, images)
    for norm, layer in normalised_layers(graph).items():
        source = next((node.inputs[0] for node in graph.layers if node.name == layer), layer)
        real = values[source].astype(np.float64) * np.float64(program.formats[source].scale)
        assert_statistics(found, norm, real_outputs(graph, layers, side, layer, real))


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "dropouts"])
def test_they_are_what_training_normalises_by(name: str) -> None:
    """A training step moves running statistics by 1/8 of the way to the batch's; its variance has n - 1.

    Only nearly so behind the first: the integer forward rounds what it adds to an accumulator, training does
    not. Statistics of another network, such as one normalised by what it came with, are far off. With dropout
    training measures something else, and nothing is to agree.
    """
    graph = GRAPHS[name]()
    layers, side = random_state(graph, bits=(8,))
    images, labels = random_batch(graph, 16)
    engine = NativeEngine(1)
    engine.load(graph, layers, side, TrainingPlan(), DRAWS)
    engine.train_epoch([(images, labels)])
    trained, found = engine.side(), measure(graph, layers, side, [images])
    for norm in normalised_layers(graph):
        height, width = graph.shapes[norm][1:] if len(graph.shapes[norm]) == 3 else (1, 1)
        count = len(images) * height * width
        mean, variance = (
            8 * trained[key] - 7 * side[key] for key in (f"{norm}.{MEAN}", f"{norm}.{VARIANCE}")
        )
        spread = found[f"{norm}.{VARIANCE}"] * count / (count - 1)
        deviation = float(np.sqrt(spread.max()))
        np.testing.assert_allclose(found[f"{norm}.{MEAN}"], mean, atol=0.03 * deviation, err_msg=norm)
        np.testing.assert_allclose(spread, variance, atol=0.1 * deviation**2, err_msg=norm)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_statistics_that_the_model_came_with_do_not_matter(name: str) -> None:
    graph = GRAPHS[name]()
    layers, side = random_state(graph)
    other = {key: tensor + 1 if key in statistics_names(graph) else tensor for key, tensor in side.items()}
    batches = [images_of(graph, 4, seed) for seed in (1, 2)]
    assert_same(measure(graph, layers, side, batches), measure(graph, layers, other, batches))


@pytest.mark.parametrize("name", GRAPHS)
def test_threads_change_no_bit(name: str) -> None:
    graph = GRAPHS[name]()
    layers, side = random_state(graph)
    batches = [images_of(graph, count, count) for count in (5, 2, 8)]
    one = measure(graph, layers, side, batches, threads=1)
    for threads in (2, 3):
        assert_same(one, measure(graph, layers, side, batches, threads=threads))


def test_a_channel_without_spread_has_variance_zero() -> None:
    graph = one_norm()
    layers, side = random_state(graph, bits=(8,))
    (layer,) = normalised_layers(graph).values()
    layers[layer].codes[1] = 128
    found = measure(graph, layers, side, [images_of(graph, 3)])
    ((norm, _),) = normalised_layers(graph).items()
    assert found[f"{norm}.{MEAN}"][1] == 0
    assert (found[f"{norm}.{VARIANCE}"] > 0).tolist() == [True, False, True]


def test_a_network_without_batchnorm_has_none() -> None:
    net = Net(2, 5, 4)
    graph = net.graph(net.add(GlobalAvgPool(), net.conv(INPUT, 3, norm=False, bias=True)))
    assert statistics_names(graph) == ()
    assert measure(graph, *random_state(graph), [images_of(graph, 4)]) == {}


def test_names_are_those_of_every_batchnorm_in_order() -> None:
    graph = GRAPHS["residuals"]()
    names = statistics_names(graph)
    assert len(names) == 2 * sum(isinstance(node.op, BatchNorm) for node in graph.nodes)
    assert list(names) == [name for name in graph.side_shapes() if name.endswith((MEAN, VARIANCE))]


def test_no_images_are_an_error() -> None:
    graph = one_norm()
    with pytest.raises(ValueError, match="no statistics to merge: a calibration needs images"):
        measure(graph, *random_state(graph), [])


# Several batches


@pytest.mark.parametrize("sizes", [(2, 2), (2, 7, 3), (16, 2, 2, 5)])
def test_batches_of_the_first_layer_are_as_one(sizes: tuple[int, ...]) -> None:
    """Nothing before it is normalised; deeper layers read codes that each batch has normalised itself."""
    graph = one_norm(4)
    layers, side = random_state(graph, bits=(5, 8))
    batches = [images_of(graph, count, seed) for seed, count in enumerate(sizes)]
    # As different as classes are.
    batches = [batch // (seed + 1) for seed, batch in enumerate(batches)]
    ((norm, layer),) = normalised_layers(graph).items()
    rows = real_outputs(graph, layers, side, layer, of_the_image(graph, np.concatenate(batches)))
    assert_statistics(measure(graph, layers, side, batches), norm, rows)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_merged_statistics_are_those_of_all_data_together(seed: int, sizes: list[int], channels: int) -> None:
    """Law of total variance, with weights proportional to the sizes."""
    random = np.random.default_rng(seed)
    sets = [random.normal(random.normal(0, 3), random.uniform(0, 2), (size, channels)) for size in sizes]
    merged = MergedStatistics()
    for rows in sets:
        merged.add(
            2.5 * len(rows),
            {
                f"a.{MEAN}": rows.mean(axis=0),
                f"a.{VARIANCE}": rows.var(axis=0),
                f"b.{MEAN}": -rows.mean(axis=0),
                f"b.{VARIANCE}": 4 * rows.var(axis=0),
            },
        )
    found, rows = merged.statistics(), np.concatenate(sets)
    assert list(found) == [f"{norm}.{part}" for norm in "ab" for part in (MEAN, VARIANCE)]
    assert all(tensor.dtype == np.float32 for tensor in found.values())
    np.testing.assert_allclose(found[f"a.{MEAN}"], rows.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[f"b.{MEAN}"], -rows.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[f"a.{VARIANCE}"], rows.var(axis=0), rtol=1e-5, atol=1e-6)
    assert (found[f"b.{VARIANCE}"] >= found[f"a.{VARIANCE}"]).all()


def test_a_variance_is_never_negative() -> None:
    """Where rounding would have it so: the same mean many times, no spread."""
    merged = MergedStatistics()
    for weight in (1.0, 3.0, 7.0, 0.1):
        merged.add(weight, {f"a.{MEAN}": np.array([0.1, 1e3 / 3]), f"a.{VARIANCE}": np.zeros(2)})
    found = merged.statistics()
    assert (found[f"a.{VARIANCE}"] >= 0).all()
    np.testing.assert_allclose(found[f"a.{VARIANCE}"], 0, atol=1e-9)


def test_nothing_merged_is_an_error() -> None:
    with pytest.raises(ValueError, match="no statistics to merge"):
        MergedStatistics().statistics()


# Which images


def numbered(count: int) -> Images:
    """Images of two pixels that say which they are."""
    return np.arange(count, dtype="<u2").view(np.uint8).reshape(count, 1, 2, 1)


def numbers(batch: Images) -> list[int]:
    return np.ascontiguousarray(batch).reshape(-1).view("<u2").tolist()


@given(st.integers(2, 1500), st.integers(2, 600), st.integers(0, 2**32 - 1))
def test_batches_hold_as_many_as_they_may_and_none_twice(count: int, size: int, seed: int) -> None:
    batches = [numbers(batch) for batch in calibration_batches(Draws(seed, 0, 0), size, numbered(count))]
    chosen = [number for batch in batches for number in batch]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(range(count))
    wanted = min(count, CALIBRATION_SAMPLES)
    assert len(chosen) == wanted - (wanted % size == 1)
    assert all(len(batch) == size for batch in batches[:-1])
    assert 2 <= len(batches[-1]) <= size


def chosen_by(draws: Draws, count: int = 2000) -> list[list[int]]:
    return [numbers(batch) for batch in calibration_batches(draws, 64, numbered(count))]


def test_images_are_drawn_from_all_there_are() -> None:
    """They may lie sorted by class: every batch, too, has some of each tenth."""
    for batch in chosen_by(DRAWS):
        assert len({number // 200 for number in batch}) >= 8


@pytest.mark.parametrize(
    "other", [Draws(9, 2, 3), Draws(1, 9, 3), Draws(1, 2, 9)], ids=["seed", "client", "round"]
)
def test_the_draw_repeats_and_its_key_matters(other: Draws) -> None:
    assert chosen_by(DRAWS) == chosen_by(DRAWS)
    assert chosen_by(DRAWS) != chosen_by(other)


@pytest.mark.parametrize("lay", [np.asfortranarray, lambda x: np.repeat(x, 2, axis=0)[::2]])
def test_layout_in_memory_does_not_matter(lay: Callable[[Images], Images]) -> None:
    graph = one_norm()
    layers, side = random_state(graph)
    images = images_of(graph, 20)
    assert not lay(images).flags.c_contiguous
    one, other = (
        measure(graph, layers, side, calibration_batches(DRAWS, 8, each)) for each in (images, lay(images))
    )
    assert_same(one, other)
