"""The integer eval forward against a slow reference, and against the float model it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.model import integer_forward
from fedmpq.model.graph import (
    Add,
    AvgPool,
    Conv2d,
    Flatten,
    Graph,
    Linear,
    MaxPool,
    Relu,
)
from fedmpq.model.integer_forward import logits, trace_values
from fedmpq.model.integer_program import compile_program
from fedmpq.model.ops import Size
from fedmpq.model.quantized import QuantizedLayer, dequantize_all
from tests.model.integer_reference import F, Model, check_against_reference
from tests.model.random_networks import (
    KINDS,
    Builder,
    plain,
    random_images,
    random_model,
    residual,
    with_groups,
)


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

    from fedmpq.training import torch_ops, torch_shapes

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
    trained, _ = torch_shapes.average_pool(torch_ops.Value(codes, program.formats[source]), op)
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


@pytest.mark.slow
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


# Images and batches.


@cache
def small_model() -> Model:
    net = Builder()
    residual(net)
    net.add(AvgPool((2, 2), (1, 1), (1, 0)))
    net.head()
    return random_model(net.graph(), 8, odd=False)


@pytest.mark.slow
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


@pytest.mark.parametrize("numbers", [1, 100, 2**20])
def test_how_many_numbers_a_pass_takes_changes_nothing(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    program = small_model().program()
    images = random_images(program.graph, 7)
    expected = trace_values(program, images)
    monkeypatch.setattr(integer_forward, "PASS_NUMBERS", numbers)
    found = trace_values(program, images)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    np.testing.assert_array_equal(logits(program, images), expected[program.output])


def test_a_value_that_two_steps_read_is_not_overwritten_by_the_first() -> None:
    """Each step is given values of its own, and those that it may not overwrite are compared afterwards."""
    program = small_model().program()
    values = trace_values(program, random_images(program.graph, 3))
    spent, overwritten = integer_forward.read_once(program), set()
    for step in program.steps:
        given = {name: value.copy() for name, value in values.items()}
        result = integer_forward.apply(step, given, integer_forward.numpy_products, spent)
        np.testing.assert_array_equal(result, values[step.output])
        overwritten |= {name for name in given if not np.array_equal(given[name], values[name])}
    assert overwritten
    assert overwritten <= spent


def test_batches_are_as_large_as_the_cache_allows() -> None:
    small = small_model().graph
    assert integer_forward.cached_batch(small) == integer_forward.GREATEST_BATCH
    wide = replace(small, input=replace(small.input, height=512, width=512))
    assert integer_forward.cached_batch(wide) == max(
        1, integer_forward.CACHED_NUMBERS // max(math.prod(shape) for shape in wide.shapes.values())
    )
    assert integer_forward.cached_batch(wide) < 10


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


@pytest.mark.slow
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


@pytest.mark.slow
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
