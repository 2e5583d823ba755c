"""Payloads as bytes: lossless, small, and refused by name when anything is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model import planes
from fedmpq.model.exchange import (
    Evaluation,
    PlanError,
    TrainingPlan,
    Update,
    payload_bytes,
    rounded_side,
)
from fedmpq.model.exchange_wire import (
    WireError,
    decode_model,
    decode_update,
    digest,
    encode_model,
    encode_update,
    model_bytes_bound,
    plan_from_message,
    plan_to_message,
)
from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, Flatten, Graph, Input, Linear, Node, Quantize, Relu
from fedmpq.model.quantized import PackedLayer, Side
from fedmpq.proto import federation_pb2, payload_pb2

GRAPH = Graph(
    "net",
    Input(1, 4, 4, 1.0, 0),
    (
        Node("conv", Conv2d(1, 3, (3, 3), (1, 1), (0, 0), (1, 1), groups=1, bias=False), (INPUT,)),
        Node("bn", BatchNorm(3, 1e-5, 0.1), ("conv",)),
        Node("relu", Relu(0.0), ("bn",)),
        Node("relu.quantized", Quantize(4, signed=False), ("relu",)),
        Node("flat", Flatten(), ("relu.quantized",)),
        Node("fc", Linear(12, 2, bias=True), ("flat",)),
    ),
    "fc",
)


def model(
    seed: int, bits: tuple[int, int] = (3, 8), per_channel: bool = False
) -> tuple[dict[str, PackedLayer], Side]:
    random = np.random.default_rng(seed)
    layers = {}
    for node, b in zip(GRAPH.layers, bits, strict=True):
        shape = GRAPH.weight_shape(node.name)
        codes = random.integers(0, 2**b, shape, dtype=np.uint8)
        step = random.uniform(0.01, 1, shape[0] if per_channel else ()).astype(np.float32)
        layers[node.name] = PackedLayer(planes.pack(codes, b), np.asarray(step, np.float32))
    side = {
        name: np.asarray(random.uniform(0.1, 2, shape), np.float32)
        for name, shape in GRAPH.side_shapes().items()
    }
    return layers, side


def update(seed: int = 0, **changes: object) -> Update:
    layers, side = model(seed)
    values: dict[str, object] = {
        "round": 3,
        "client": 2,
        "samples": 50,
        "layers": layers,
        "side": side,
        "loss": 0.25,
        "accuracy": 0.5,
        "evaluation": Evaluation(40, 30),
    }
    return Update(**{**values, **changes})  # type: ignore[arg-type]


def assert_same_model(
    one: tuple[dict[str, PackedLayer], Side], other: tuple[dict[str, PackedLayer], Side]
) -> None:
    for name, layer in one[0].items():
        assert other[0][name].bits == layer.bits
        np.testing.assert_array_equal(other[0][name].planes, layer.planes)
        assert other[0][name].step.tobytes() == layer.step.tobytes()
    for name, tensor in one[1].items():
        assert other[1][name].shape == tensor.shape
        assert other[1][name].dtype == np.float32
        assert other[1][name].tobytes() == tensor.tobytes()


@given(st.integers(0, 2**32), st.tuples(st.integers(1, 8), st.integers(1, 8)), st.booleans(), st.booleans())
def test_a_model_comes_back_as_it_was(
    seed: int, bits: tuple[int, int], per_channel: bool, half: bool
) -> None:
    layers, side = model(seed, bits, per_channel)
    side = rounded_side(side, 16) if half else side
    data = encode_model(GRAPH, layers, side)
    assert_same_model((layers, side), decode_model(GRAPH, data))
    assert encode_model(GRAPH, layers, side) == data
    assert payload_bytes(layers, side) < len(data) <= model_bytes_bound(GRAPH)
    # Three bytes a tensor, and the graph's id.
    assert len(data) <= payload_bytes(layers, side) + 10 * len(layers) + 6 * len(side) + 40


def test_an_update_comes_back_as_it_was() -> None:
    sent = update()
    run_id, got = decode_update(GRAPH, encode_update(GRAPH, "run-1", sent))
    assert run_id == "run-1"
    assert (got.round, got.client, got.samples, got.loss, got.accuracy) == (3, 2, 50, 0.25, 0.5)
    assert got.evaluation == Evaluation(40, 30)
    assert_same_model((dict(sent.layers), sent.side), (dict(got.layers), got.side))
    _, plain = decode_update(GRAPH, encode_update(GRAPH, "r", update(evaluation=None)))
    assert plain.evaluation is None


def test_the_digest_is_sha_256() -> None:
    assert digest(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def altered(change: Callable[[payload_pb2.UpdatePayload], object]) -> bytes:
    message = payload_pb2.UpdatePayload()
    message.ParseFromString(encode_update(GRAPH, "run", update()))
    change(message)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.model.ClearField("graph_id"), "is of graph none, this run trains"),
        (lambda m: m.model.layers.pop(), "has 1 layers, the graph 2"),
        (lambda m: m.model.side.pop(), "side tensors, the graph"),
        (lambda m: setattr(m.model.layers[0], "bits", 0), "'conv' has 0 bits"),
        (lambda m: setattr(m.model.layers[0], "bits", 9), "'conv' has 9 bits"),
        (
            lambda m: setattr(m.model.layers[0], "bits", 4),
            "12 bytes of planes; 27 weights at 4 bits take 16",
        ),
        (lambda m: setattr(m.model.layers[0], "planes", b"\xff" * 12), "'conv' has padding bits set"),
        (lambda m: setattr(m.model.layers[1], "steps", b""), "'fc' has 0 bytes of steps"),
        (
            lambda m: setattr(m.model.layers[1], "steps", np.float32(0).tobytes()),
            "'fc' has a step that",
        ),
        (lambda m: setattr(m.model.layers[1], "steps", np.float32(np.nan).tobytes()), "'fc' has a step that"),
        (lambda m: m.model.side[0].Clear(), "'bn.weight' is empty"),
        (lambda m: setattr(m.model.side[0], "single", b"\0" * 11), "'bn.weight' has 11 bytes, not 3 values"),
        (lambda m: setattr(m.model.side[0], "half", b"\xff\xff" * 3), "'bn.weight' holds a NaN"),
        (lambda m: setattr(m, "loss", math.inf), "the loss is inf"),
        (lambda m: setattr(m, "accuracy", math.nan), "the accuracy is nan"),
        (lambda m: setattr(m, "accuracy", 1.5), "the accuracy is 1.5"),
        (lambda m: setattr(m.evaluation, "correct", 41), "41 of 40"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: Callable[[payload_pb2.UpdatePayload], object], message: str
) -> None:
    with pytest.raises(WireError, match=message):
        decode_update(GRAPH, altered(change))


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 100))
def test_no_bytes_do_worse_than_a_wire_error(junk: bytes, at: int, cut: int) -> None:
    good = encode_update(GRAPH, "run", update())
    for data in (junk, good[:at], good[:at] + junk + good[at + cut :]):
        try:
            _, got = decode_update(GRAPH, data)
        except WireError:
            continue
        assert got.layers.keys() == {"conv", "fc"}
        assert all(np.isfinite(tensor).all() for tensor in got.side.values())


def test_fields_of_a_newer_version_are_skipped() -> None:
    good = encode_update(GRAPH, "run", update())
    unknown = bytes([15 << 3 | 2, 3]) + b"new"
    assert decode_update(GRAPH, good + unknown)[0] == "run"


@pytest.mark.parametrize(
    "plan", [TrainingPlan(), TrainingPlan(prune_density=None, flip=True, pad=4, side_bits=32)]
)
def test_a_plan_comes_back_as_it_was(plan: TrainingPlan) -> None:
    message = federation_pb2.TrainingPlan.FromString(plan_to_message(plan).SerializeToString())
    assert plan_from_message(message) == plan


def test_a_plan_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match="epochs = 0"):
        plan_from_message(federation_pb2.TrainingPlan(update="paper"))
