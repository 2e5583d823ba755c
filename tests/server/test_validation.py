"""What the server makes of updates that are not what the assignment asked for: it says why and takes none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.exchange.messages import Assignment, Calibration, Evaluation, Update, rounded_side, unpack_layers
from fedmpq.exchange.wire import decode_model, encode_calibration, encode_model, encode_update
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import ClientRecord
from fedmpq.model.calibration import measure
from fedmpq.model.quantized import PackedLayer
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto import payload_pb2
from fedmpq.server.statistics_bounds import statistics_bounds
from fedmpq.server.validation import Expected, Rejected, check_calibration, check_update
from tests.server.loopback import small_config
from tests.server.small_model import GRAPH, first_state
from tests.server.stand_in import made_up, nudge

RUN = "f" * 32
SAMPLES = 10


def sent() -> Assignment:
    method = QuantizedMethod(GRAPH, small_config(profile="paper").recipe(), 0)
    client = ClientRecord(3, 4.0, SAMPLES)
    return method.assign(method.start(*first_state(), [client]), client)


SENT = sent()
EXPECTED = Expected(
    run_id=RUN,
    round=1,
    client=3,
    layers=unpack_layers(GRAPH, SENT.layers),
    side=SENT.side,
    max_samples=SAMPLES,
    max_norm=4.0,
    bounds=statistics_bounds(GRAPH, unpack_layers(GRAPH, SENT.layers), SENT.side),
)
GOOD = nudge(
    GRAPH,
    pb.Assignment(run_id=RUN, round=1, client=3, evaluate=True),
    encode_model(GRAPH, SENT.layers, SENT.side),
    SAMPLES,
)
GOOD_BYTES = encode_update(GRAPH, RUN, GOOD)


def test_an_honest_update_passes() -> None:
    update = check_update(GRAPH, GOOD_BYTES, EXPECTED)
    assert (update.client, update.samples, update.evaluation) == (3, SAMPLES, Evaluation(10, 5))
    for name, layer in GOOD.layers.items():
        np.testing.assert_array_equal(update.layers[name].planes, layer.planes)


def with_layer(change: Callable[[PackedLayer], PackedLayer]) -> Update:
    return replace(GOOD, layers={**GOOD.layers, "conv2": change(GOOD.layers["conv2"])})


def with_side(name: str, value: float) -> Update:
    tensor = np.full_like(GOOD.side[name], value)
    return replace(GOOD, side={**GOOD.side, name: tensor})


def clip_name() -> str:
    return next(name for name in GOOD.side if name.endswith(".clip"))


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (replace(GOOD, round=2), "of round 2, not 1"),
        (replace(GOOD, client=4), "of client 4; its sender is 3"),
        (replace(GOOD, samples=0), "0 samples"),
        (replace(GOOD, samples=11), "11 samples"),
        (replace(GOOD, samples=2**64 - 1), "samples"),
        (replace(GOOD, loss=-1.0), "loss of -1"),
        (replace(GOOD, loss=1e300), "loss"),
        (replace(GOOD, evaluation=Evaluation(2**60, 5)), "evaluated"),
        (with_layer(lambda layer: PackedLayer(layer.planes, layer.step * 2)), "'conv2' .* other steps"),
        (
            with_layer(lambda layer: PackedLayer(np.vstack([layer.planes] * 2)[:8], layer.step)),
            "'conv2' .* bits; it was dealt",
        ),
        (with_side("bn1.running_var", -1.0), "'bn1.running_var' holds a negative variance"),
        (with_side("bn1.weight", 1e9), "'bn1.weight' moves by"),
        (with_side("fc.bias", -1e30), "'fc.bias' moves by"),
        (with_side("bn1.running_var", 1e9), "'bn1.running_var' has 1e.09 in channel 0; at most"),
        (with_side("bn1.running_mean", -1e6), "'bn1.running_mean' has -1e.06 in channel 0; at most"),
        (with_side(clip_name(), 0.0), "clips are positive"),
        (with_side(clip_name(), 1e4), "may change by a factor of 16"),
        (with_side(clip_name(), 1e-4), "may change by a factor of 16"),
    ],
)
def test_what_the_assignment_does_not_allow_is_rejected(update: Update, message: str) -> None:
    with pytest.raises(Rejected, match=message):
        check_update(GRAPH, encode_update(GRAPH, RUN, update), EXPECTED)


def test_an_update_of_another_run_is_rejected() -> None:
    with pytest.raises(Rejected, match="of run"):
        check_update(GRAPH, encode_update(GRAPH, "e" * 32, GOOD), EXPECTED)


def test_the_norm_of_an_update_is_bounded() -> None:
    turned = {
        name: PackedLayer(_without_padding(name, ~layer.planes), layer.step)
        for name, layer in GOOD.layers.items()
    }
    flipped = encode_update(GRAPH, RUN, replace(GOOD, layers=turned))
    check_update(GRAPH, flipped, EXPECTED)
    with pytest.raises(Rejected, match=r"max_update_norm is 0\.5"):
        check_update(GRAPH, flipped, replace(EXPECTED, max_norm=0.5))


def _without_padding(name: str, planes: np.ndarray) -> np.ndarray:
    weights = int(np.prod(GRAPH.weight_shape(name)))
    if weights % 8:
        planes[:, -1] &= np.uint8((1 << weights % 8) - 1)
    return planes


def check_or_reject(data: bytes) -> Update | None:
    """Any other exception is the server's fault."""
    try:
        return check_update(GRAPH, data, EXPECTED)
    except Rejected:
        return None


@settings(max_examples=150)
@given(st.binary(max_size=400))
def test_no_bytes_break_it(data: bytes) -> None:
    assert check_or_reject(data) is None


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_updates_are_rejected_or_harmless(data: st.DataObject) -> None:
    """Cut off, or with some bytes replaced: what passes has the shapes of the graph and finite numbers."""
    damaged = bytearray(GOOD_BYTES[: data.draw(st.integers(0, len(GOOD_BYTES)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] = data.draw(st.integers(0, 255))
    update = check_or_reject(bytes(damaged))
    if update is None:
        return
    assert (update.round, update.client) == (1, 3)
    assert 1 <= update.samples <= SAMPLES
    for name, layer in update.layers.items():
        assert layer.bits <= SENT.layers[name].bits
        assert layer.step.tobytes() == SENT.layers[name].step.tobytes()
    assert all(np.isfinite(tensor).all() for tensor in update.side.values())


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "run_id": st.text(max_size=40),
        "round": st.integers(0, 2**32 - 1),
        "client": st.integers(0, 2**32 - 1),
        "samples": st.integers(0, 2**64 - 1),
        "loss": st.floats(),
        "accuracy": st.floats(),
    },
)


@settings(max_examples=150)
@given(
    fields=FIELDS,
    layer=st.integers(0, 2),
    bits=st.integers(0, 2**32 - 1),
    planes=st.none() | st.binary(max_size=200),
    steps=st.none() | st.binary(max_size=40),
    side=st.none() | st.binary(max_size=40),
    correct=st.integers(0, 2**64 - 1),
)
def test_any_fields_are_rejected_or_harmless(
    fields: dict[str, object],
    layer: int,
    bits: int,
    planes: bytes | None,
    steps: bytes | None,
    side: bytes | None,
    correct: int,
) -> None:
    message = payload_pb2.UpdatePayload.FromString(GOOD_BYTES)
    for name, value in fields.items():
        setattr(message, name, value)
    message.evaluation.correct = correct
    changed = message.model.layers[layer]
    if planes is not None:
        changed.bits, changed.planes = bits, planes
    if steps is not None:
        changed.steps = steps
    if side is not None:
        message.model.side[layer].single = side
    update = check_or_reject(message.SerializeToString())
    if update is not None:
        assert update.evaluation is not None
        assert update.evaluation.correct <= update.evaluation.samples <= SAMPLES
        assert 0 <= update.loss <= 1e6
        assert (update.round, update.client) == (1, 3)


def test_fields_nobody_knows_are_skipped() -> None:
    """Field 99, of a version to come."""
    assert check_or_reject(GOOD_BYTES + b"\x9a\x06\x03abc") is not None
    decode_model(GRAPH, encode_model(GRAPH, SENT.layers, SENT.side) + b"\x9a\x06\x03abc")


# Changes, as the carried rule returns them


CARRIED = replace(EXPECTED, update="carried")
CHANGED = nudge(
    GRAPH,
    pb.Assignment(run_id=RUN, round=1, client=3, plan=pb.TrainingPlan(update="carried")),
    encode_model(GRAPH, SENT.layers, SENT.side),
    SAMPLES,
)


def changed(edit: Callable[[PackedLayer], PackedLayer]) -> bytes:
    layers = {**CHANGED.layers, "conv2": edit(CHANGED.layers["conv2"])}
    return encode_update(GRAPH, RUN, replace(CHANGED, layers=layers))


def test_an_honest_change_passes() -> None:
    update = check_update(GRAPH, encode_update(GRAPH, RUN, CHANGED), CARRIED)
    assert {name: float(layer.step) for name, layer in update.layers.items()} == dict.fromkeys(
        CHANGED.layers, 1.0
    )


@pytest.mark.parametrize("step", [0.5, 1.5, 2.0 * 256 * 256 + 1])
def test_a_change_moves_by_whole_256ths(step: float) -> None:
    data = changed(lambda layer: PackedLayer(layer.planes, np.full_like(layer.step, step)))
    with pytest.raises(Rejected, match=r"'conv2' has a step that is no whole number in 1\.\.131072"):
        check_update(GRAPH, data, CARRIED)


def test_a_change_has_the_bits_that_were_dealt() -> None:
    for planes in (CHANGED.layers["conv2"].planes[1:], np.vstack([CHANGED.layers["conv2"].planes] * 2)[:8]):
        layers = {**CHANGED.layers, "conv2": PackedLayer(planes, CHANGED.layers["conv2"].step)}
        data = encode_update(GRAPH, RUN, replace(CHANGED, layers=layers))
        with pytest.raises(Rejected, match=r"'conv2' has . bits; it was dealt"):
            check_update(GRAPH, data, CARRIED)


def test_the_norm_of_a_change_is_bounded() -> None:
    with pytest.raises(Rejected, match="max_update_norm is 4"):
        check_update(
            GRAPH, changed(lambda layer: PackedLayer(layer.planes, np.full_like(layer.step, 131072))), CARRIED
        )


# Calibrations


MEASURED = made_up(GRAPH, pb.Assignment(round=1, client=3), b"", SAMPLES)


def with_statistic(name: str, value: float, channel: int = 1) -> Calibration:
    tensor = MEASURED.statistics[name].copy()
    tensor[channel] = value
    return replace(MEASURED, statistics={**MEASURED.statistics, name: tensor})


def test_honest_statistics_pass() -> None:
    """Those of any images: real ones, black, white, and noise."""
    random = np.random.default_rng(0)
    for images in (
        np.zeros((2, 8, 8, 1), np.uint8),
        np.full((3, 8, 8, 1), 255, np.uint8),
        random.integers(0, 256, (7, 8, 8, 1), np.uint8),
        255 * random.integers(0, 2, (7, 8, 8, 1), np.uint8),
    ):
        statistics = measure(GRAPH, EXPECTED.layers, EXPECTED.side, [images])
        found = replace(MEASURED, statistics=rounded_side(statistics, 16))
        data = encode_calibration(GRAPH, RUN, found)
        assert check_calibration(GRAPH, data, EXPECTED).samples == SAMPLES


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (replace(MEASURED, round=2), "of round 2, not 1"),
        (replace(MEASURED, client=4), "of client 4; its sender is 3"),
        (replace(MEASURED, samples=11), "11 samples"),
        (replace(MEASURED, samples=0), "0 samples"),
        (replace(MEASURED, evaluation=Evaluation(11, 3)), "evaluated 11 samples; the client may say 10"),
        (with_statistic("bn1.running_var", -0.1), "'bn1.running_var' holds a negative variance"),
        (with_statistic("bn1.running_var", float("nan")), "'bn1.running_var'"),
        (with_statistic("bn2.running_mean", float("inf")), "'bn2.running_mean'"),
        (with_statistic("bn2.running_mean", -1e4), "'bn2.running_mean' has -1e.04 in channel 1; at most"),
        (
            with_statistic("bn2.running_var", 1e4),
            r"'bn2.running_var' has 1e.04 in channel 1; at most .* possible",
        ),
    ],
)
def test_statistics_that_cannot_be_are_rejected(calibration: Calibration, message: str) -> None:
    with pytest.raises(Rejected, match=message):
        check_calibration(GRAPH, encode_calibration(GRAPH, RUN, calibration), EXPECTED)


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_no_bytes_break_a_calibration(data: bytes) -> None:
    with pytest.raises(Rejected):
        check_calibration(GRAPH, data, EXPECTED)
