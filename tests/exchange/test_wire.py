"""Payloads as bytes: lossless, small, and refused by name when anything is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.exchange.messages import (
    Calibration,
    Evaluation,
    Phase,
    PlanError,
    TrainingPlan,
    Update,
    payload_bytes,
    rounded_side,
)
from fedmpq.exchange.wire import (
    WireError,
    calibration_bytes_bound,
    decode_calibration,
    decode_model,
    decode_update,
    digest,
    encode_calibration,
    encode_model,
    encode_update,
    model_bytes_bound,
    phase_from_message,
    phase_to_message,
    plan_from_message,
    plan_to_message,
)
from fedmpq.model import planes
from fedmpq.model.calibration import statistics_names
from fedmpq.model.graph import (
    INPUT,
    BatchNorm,
    Conv2d,
    Flatten,
    Graph,
    Input,
    Linear,
    Node,
    Op,
    Quantize,
    Relu,
)
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


WIDE = Graph(
    "wide",
    Input(2, 8, 8, 1.0, 0),
    (Node("flat", Flatten(), (INPUT,)), Node("fc", Linear(128, 10, bias=True), ("flat",))),
    "fc",
)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 2**32))
def test_a_coded_model_is_the_same_and_never_longer(bits: int, spread: int, seed: int) -> None:
    draws = np.random.default_rng(seed).normal(2**bits / 2, 2**bits / spread, (10, 128))
    codes = np.clip(draws, 0, 2**bits - 1).astype(np.uint8)
    layers = {"fc": PackedLayer(planes.pack(codes, bits), np.asarray(0.5, np.float32))}
    side = {name: np.zeros(shape, np.float32) for name, shape in WIDE.side_shapes().items()}
    data = encode_model(WIDE, layers, side, coded=True)
    assert_same_model((layers, side), decode_model(WIDE, data))
    message = payload_pb2.ModelPayload()
    message.ParseFromString(data)
    shorter = len(encode_model(WIDE, layers, side)) - len(data)
    assert shorter > 0 if message.layers[0].coded else shorter == 0
    # Codes that lie close together are coded whatever their number, but not where there are only two.
    assert message.layers[0].coded or spread < 20 or bits == 1


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
        (lambda m: setattr(m.model.layers[0], "coded", b"abc"), "has both planes and a code"),
        (
            lambda m: m.model.layers[0].CopyFrom(payload_pb2.LayerPlanes(bits=3, coded=b"abc")),
            "'conv' is damaged: 3 bytes are not the code of 27 codes of 3 bits",
        ),
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


# Calibration

MEAN, VARIANCE = "bn.running_mean", "bn.running_var"
Change = Callable[[payload_pb2.CalibrationPayload], object]


def calibration(seed: int = 0) -> Calibration:
    random = np.random.default_rng(seed)
    statistics = {
        MEAN: random.normal(0, 1, 3).astype(np.float32),
        VARIANCE: random.uniform(0, 2, 3).astype(np.float32),
    }
    return Calibration(round=3, client=2, samples=50, statistics=statistics)


EVALUATIONS = (None, Evaluation(7, 0), Evaluation(9, 9), Evaluation(9, 0, 0.25), Evaluation(1, 0, -1.0))


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(EVALUATIONS))
def test_a_calibration_comes_back_as_it_was(seed: int, half: bool, evaluation: Evaluation | None) -> None:
    sent = replace(calibration(seed), evaluation=evaluation)
    if half:
        sent = replace(sent, statistics=rounded_side(sent.statistics, 16))
    data = encode_calibration(GRAPH, "run-1", sent)
    run_id, got = decode_calibration(GRAPH, data)
    assert (run_id, got.round, got.client, got.samples) == ("run-1", 3, 2, 50)
    assert got.evaluation == evaluation
    assert tuple(got.statistics) == statistics_names(GRAPH) == (MEAN, VARIANCE)
    for name, tensor in sent.statistics.items():
        assert got.statistics[name].dtype == np.float32
        assert got.statistics[name].shape == (3,)
        assert got.statistics[name].tobytes() == tensor.tobytes()
    assert encode_calibration(GRAPH, "run-1", sent) == data
    assert sent.nbytes == (12 if half else 24)
    assert sent.nbytes < len(data) <= sent.nbytes + 39


def test_more_right_than_there_are_is_refused() -> None:
    data = encode_calibration(GRAPH, "run-1", replace(calibration(0), evaluation=Evaluation(3, 4)))
    with pytest.raises(WireError, match="4 of 3 samples correct"):
        decode_calibration(GRAPH, data)


def test_no_calibration_is_longer_than_the_bound() -> None:
    """All in single precision, every number as long as it can be, and an id of 32 digits."""
    greatest = np.full(3, np.finfo(np.float32).max)
    most = Evaluation(2**64 - 1, 2**64 - 1, 1.0)
    longest = Calibration(2**32 - 1, 2**32 - 1, 2**64 - 1, {MEAN: greatest, VARIANCE: greatest}, most)
    data = encode_calibration(GRAPH, "f" * 32, longest)
    assert longest.nbytes == 24
    assert len(data) <= calibration_bytes_bound(GRAPH) < model_bytes_bound(GRAPH)
    wide = replace(GRAPH, nodes=wider(GRAPH, 3000))
    values = np.full(3000, np.finfo(np.float32).max)
    long = replace(longest, statistics={MEAN: values, VARIANCE: values})
    assert 24_000 < len(encode_calibration(wide, "f" * 32, long)) <= calibration_bytes_bound(wide) < 26_000


def wider(graph: Graph, channels: int) -> tuple[Node, ...]:
    """The nodes with so many channels in place of three."""
    ops: dict[str, Op] = {
        "conv": Conv2d(1, channels, (3, 3), (1, 1), (0, 0), (1, 1), groups=1, bias=False),
        "bn": BatchNorm(channels, 1e-5, 0.1),
        "fc": Linear(4 * channels, 2, bias=True),
    }
    return tuple(replace(node, op=ops.get(node.name, node.op)) for node in graph.nodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.statistics.pop(), "has 1 statistics, the graph 2"),
        (lambda m: m.statistics.append(m.statistics[0]), "has 3 statistics, the graph 2"),
        (lambda m: m.statistics[0].Clear(), "'bn.running_mean' is empty"),
        (lambda m: setattr(m.statistics[0], "single", b"\0" * 8), "'bn.running_mean' has 8 bytes, not 3"),
        (lambda m: setattr(m.statistics[0], "half", b"\0" * 8), "'bn.running_mean' has 8 bytes, not 3"),
        (lambda m: put(m, 0, [0, math.nan, 0]), "'bn.running_mean' holds a NaN"),
        (lambda m: put(m, 0, [0, 0, -math.inf]), "'bn.running_mean' holds a NaN or an infinity"),
        (lambda m: put(m, 1, [0, math.nan, 0]), "'bn.running_var' holds a NaN"),
        (lambda m: put(m, 1, [math.inf, 1, 1]), "'bn.running_var' holds a NaN or an infinity"),
        (lambda m: put(m, 1, [1, 1, -1e-30]), "'bn.running_var' holds a negative variance"),
        (lambda m: put(m, 1, [1, -math.inf, 1]), "'bn.running_var' holds"),
    ],
)
def test_statistics_that_do_not_fit_are_refused_by_name(change: Change, message: str) -> None:
    sent = payload_pb2.CalibrationPayload.FromString(encode_calibration(GRAPH, "run", calibration()))
    change(sent)
    with pytest.raises(WireError, match=message):
        decode_calibration(GRAPH, sent.SerializeToString())


def put(message: payload_pb2.CalibrationPayload, index: int, values: list[float]) -> None:
    message.statistics[index].single = np.array(values, "<f4").tobytes()


def test_negative_means_and_zero_variances_are_fine() -> None:
    statistics = {MEAN: np.array([-1, 0, 1], np.float32), VARIANCE: np.array([0, -0.0, 1], np.float32)}
    sent = Calibration(1, 0, 2, statistics)
    _, got = decode_calibration(GRAPH, encode_calibration(GRAPH, "run", sent))
    assert all(got.statistics[name].tobytes() == statistics[name].tobytes() for name in statistics)


def test_a_calibration_cut_short_is_refused() -> None:
    """Wherever: either it is no message, or tensors are missing or short."""
    good = encode_calibration(GRAPH, "run", calibration())
    for end in range(len(good)):
        with pytest.raises(WireError):
            decode_calibration(GRAPH, good[:end])


@given(st.binary(max_size=100), st.integers(0, 80), st.integers(0, 40))
def test_no_bytes_make_worse_statistics_than_a_wire_error(junk: bytes, at: int, cut: int) -> None:
    good = encode_calibration(GRAPH, "run", calibration())
    for data in (junk, good[:at] + junk + good[at + cut :]):
        try:
            _, got = decode_calibration(GRAPH, data)
        except WireError:
            continue
        assert all(np.isfinite(tensor).all() for tensor in got.statistics.values())
        assert (got.statistics[VARIANCE] >= 0).all()


def test_an_update_is_no_calibration_and_the_other_way_round() -> None:
    with pytest.raises(WireError):
        decode_calibration(GRAPH, encode_update(GRAPH, "run", update()))
    with pytest.raises(WireError):
        decode_update(GRAPH, encode_calibration(GRAPH, "run", calibration()))


def test_a_phase_comes_back_and_an_unknown_one_is_refused() -> None:
    assert [phase_from_message(phase_to_message(phase)) for phase in get_args(Phase)] == list(get_args(Phase))
    # What a server that knows no phases leaves out is training.
    assert phase_from_message(federation_pb2.Assignment().phase) == "training"
    with pytest.raises(WireError, match="phase 7 is none of this version's; upgrade fedmpq"):
        phase_from_message(7)


@pytest.mark.parametrize(
    "plan",
    [TrainingPlan(), TrainingPlan(update="carried", prune_density=None, flip=True, pad=4, side_bits=32)],
)
def test_a_plan_comes_back_as_it_was(plan: TrainingPlan) -> None:
    message = federation_pb2.TrainingPlan.FromString(plan_to_message(plan).SerializeToString())
    assert plan_from_message(message) == plan


def test_a_plan_out_of_range_is_refused() -> None:
    with pytest.raises(PlanError, match="epochs = 0"):
        plan_from_message(federation_pb2.TrainingPlan(update="paper"))


@pytest.mark.parametrize("score", [1.5, -1.01, float("nan"), float("inf")])
def test_a_score_that_no_metric_has_is_refused(score: float) -> None:
    data = encode_calibration(GRAPH, "run-1", replace(calibration(0), evaluation=Evaluation(3, 0, score)))
    with pytest.raises(WireError, match=r"the score is .*; it must be in -1\.\.1"):
        decode_calibration(GRAPH, data)
