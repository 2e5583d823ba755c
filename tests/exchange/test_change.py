"""What a round has moved: codes against the nearest found by trying, steps against all that there are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq.exchange.change import (
    MAX_CHANGE_STEP,
    Fractions,
    change_in_weights,
    change_of,
    change_within_cells,
)
from fedmpq.model.grid import code_range, dequantize, quantize, zero_point
from fedmpq.model.quantized import QuantizedLayer

BITS = range(1, 9)
Whole = NDArray[np.int64]
ONE = np.array(1, np.float32)


def nearest(change: int, step: int, bits: int, place: int) -> int:
    """The code whose value is nearest to the change; of two as near the greater, but the lesser at odd places
    of grids that have no zero."""
    low, high = code_range(bits)
    tried = range(high, low - 1, -1) if bits == 8 or place % 2 == 0 else range(low, high + 1)
    return min(tried, key=lambda code: abs(change - step * (code - zero_point(bits))))


def squared_error(change: Whole, step: int, bits: int) -> float:
    """Exact: a double holds every number in it."""
    low, high = code_range(bits)
    zero = zero_point(bits)
    centred = np.clip(np.floor(change / step + zero + 0.5), low, high) - zero
    return float(np.square(change - step * centred).sum())


def spanning(change: Whole, bits: int) -> int:
    """The least whole step whose grid reaches, to half a step, the greatest change."""
    return max(1, math.ceil(2 * int(np.abs(change).max()) / (254 if bits == 8 else int(2**bits - 1))))


def layers_that_moved_by(
    change: Whole, bits: int, step: NDArray[np.float32] = ONE
) -> tuple[QuantizedLayer, QuantizedLayer, Fractions]:
    """From the end of the codes that leaves room, in 256ths of a step."""
    low, high = code_range(bits)
    sent = np.where(change >= 0, low, high)
    trained, fractions = sent + ((change + 128) >> 8), (change + 128) % 256 - 128
    assert trained.min() >= low
    assert trained.max() <= high
    before, after = (QuantizedLayer(codes.astype(np.uint8), bits, step) for codes in (sent, trained))
    return before, after, fractions.astype(np.int8).reshape(-1)


def greatest_change(bits: int) -> int:
    low, high = code_range(bits)
    return 256 * (high - low) + 127


def changed(change: Whole, bits: int, step: NDArray[np.float32] = ONE) -> QuantizedLayer:
    return change_of(*layers_that_moved_by(change, bits, step))


def coded_error(change: Whole, found: QuantizedLayer) -> float:
    centred = found.codes.astype(np.float64) - zero_point(found.bits)
    return float(np.square(change - found.step * centred).sum())


def normal(bits: int, deviation: float, count: int = 400, seed: int = 0) -> Whole:
    most = greatest_change(bits)
    drawn = np.random.default_rng(seed).normal(0, deviation, count)
    return np.clip(np.rint(drawn), -most, most).astype(np.int64)


@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_every_weight_gets_the_nearest_code_of_a_whole_step(
    data: st.DataObject, bits: int, rows: int, columns: int, per_channel: bool
) -> None:
    low, high = code_range(bits)
    codes = hnp.arrays(np.uint8, (rows, columns), elements=st.integers(low, high))
    step = np.ones(rows, np.float32) if per_channel else ONE
    sent, trained = (QuantizedLayer(data.draw(codes), bits, step) for _ in range(2))
    fractions = data.draw(hnp.arrays(np.int8, rows * columns))
    found = change_of(sent, trained, fractions)
    assert (found.bits, found.codes.shape, found.step.shape) == (bits, (rows, columns), step.shape)
    assert found.codes.dtype == np.uint8
    assert found.step.dtype == np.float32
    change = 256 * (trained.codes.astype(int) - sent.codes.astype(int)) + fractions.reshape(rows, columns)
    steps = np.broadcast_to(found.step.reshape(-1), rows)
    for row in range(rows):
        whole = int(steps[row])
        assert whole == steps[row]
        assert 1 <= whole <= MAX_CHANGE_STEP
        first = row * columns if not per_channel else 0
        expected = [nearest(int(each), whole, bits, first + place) for place, each in enumerate(change[row])]
        assert found.codes[row].tolist() == expected


@given(st.data(), st.integers(1, 8), st.integers(1, 6))
def test_the_step_is_never_worse_than_the_one_that_spans_the_change(
    data: st.DataObject, bits: int, count: int
) -> None:
    most = greatest_change(bits)
    change = data.draw(hnp.arrays(np.int64, count, elements=st.integers(-most, most)))
    wide = spanning(change, bits)
    error = coded_error(change, changed(change, bits))
    assert error <= squared_error(change, wide, bits) <= count * (wide / 2) ** 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("deviation", [3, 40, 1000])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_error_is_near_the_least_of_all_steps(bits: int, deviation: float, heavy: bool) -> None:
    """Of a layer's weights: a few of them may by chance lie on a grid that the search passes by."""
    change = normal(bits, deviation)
    if heavy:
        most = greatest_change(bits)
        change[::40] = np.clip(8 * change[::40], -most, most)
    least = min(squared_error(change, step, bits) for step in range(1, 2 * spanning(change, bits) + 1))
    assert coded_error(change, changed(change, bits)) <= 1.05 * least


@pytest.mark.parametrize("bits", BITS)
def test_no_change_is_the_least_there_is(bits: int) -> None:
    """Zero at 8 bits; below, where no code is zero, half a 256th of a step."""
    still = np.zeros((3, 5), np.int64)
    for step in (ONE, np.ones(3, np.float32)):
        found = changed(still, bits, step)
        assert (found.step == 1).all()
        in_weights = change_in_weights(found, QuantizedLayer(found.codes, bits, step))
        assert np.abs(in_weights).max() == (0 if bits == 8 else 1 / 512)


@pytest.mark.parametrize("bits", BITS)
def test_weights_that_nobody_trains_do_not_drift(bits: int) -> None:
    """Among others that moved, of which the step is large."""
    change = normal(bits, 60.0)
    change[100:300] = 0
    found = changed(change, bits)
    in_weights = change_in_weights(found, QuantizedLayer(found.codes, bits, ONE))
    assert found.step > 1
    assert in_weights[100:300].sum() == 0


@given(st.data(), st.integers(1, 8))
def test_one_weight_alone_is_kept_to_half_the_reach_of_the_least_step(data: st.DataObject, bits: int) -> None:
    """Its greatest code times a step that spans it overshoots by less than that code."""
    most = greatest_change(bits)
    change = np.array([data.draw(st.integers(-most, most))])
    found = changed(change, bits)
    bound = float(found.step) / 2 if bits == 8 else (2**bits - 1) / 2
    assert abs(float(change[0]) - float(found.step) * (int(found.codes[0]) - zero_point(bits))) <= bound
    if bits == 1 and change[0]:
        assert coded_error(change, found) == 0


@pytest.mark.parametrize("bits", BITS)
def test_a_move_from_end_to_end_fits(bits: int) -> None:
    most = greatest_change(bits)
    low, high = code_range(bits)
    found = changed(np.array([most, -most - 1]), bits)
    assert found.codes.tolist() == [high, low]
    reach = float(found.step) * (high - zero_point(bits))
    assert abs(reach - most) <= max(found.step / 2, 2**bits)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_lone_outlier_saturates_and_does_not_coarsen_the_rest(bits: int) -> None:
    most = greatest_change(bits)
    change = normal(bits, 4, count=20_000)
    change[7], change[8] = most, -most
    found = changed(change, bits)
    assert found.step < spanning(change, bits) / 3
    low, high = code_range(bits)
    assert found.codes[7:9].tolist() == [high, low]
    assert float(found.step) * (high - zero_point(bits)) < most / 2


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_step_per_channel_is_the_step_of_that_channel_alone(bits: int) -> None:
    change = np.stack([normal(bits, deviation, 36, seed) for seed, deviation in enumerate((5, 100, 400))])
    whole = changed(change.reshape(3, 4, 3, 3), bits, np.array([0.5, 1, 2], np.float32))
    assert whole.step.shape == (3,)
    assert 2 * whole.step[0] < whole.step[1] < whole.step[2] / 2
    for channel in range(3):
        alone = changed(change[channel], bits)
        assert alone.step == whole.step[channel]
        np.testing.assert_array_equal(whole.codes[channel].reshape(-1), alone.codes)


def test_every_bit_more_is_finer() -> None:
    """Each halves the step, or nearly, as long as the step is more than the least."""
    change = normal(2, 150, count=2000)
    found = {bits: changed(change, bits) for bits in BITS if bits > 1}
    for bits in range(2, 8):
        assert 3 * coded_error(change, found[bits + 1]) < coded_error(change, found[bits])
        assert found[bits + 1].step < 0.7 * found[bits].step
    assert 1000 * coded_error(change, found[8]) < coded_error(change, found[2])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_layout_in_memory_does_not_matter(bits: int, per_channel: bool) -> None:
    change = normal(bits, 50, count=5 * 14).reshape(5, 14)
    step = np.ones(5, np.float32) if per_channel else ONE
    sent, trained, fractions = layers_that_moved_by(change, bits, step)
    expected = change_of(sent, trained, fractions)
    spread = np.repeat(fractions, 3)[::3]
    turned = [replace(layer, codes=np.asfortranarray(layer.codes)) for layer in (sent, trained)]
    found = change_of(turned[0], turned[1], spread)
    assert not spread.flags.c_contiguous
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.step, expected.step)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_in_weights_it_is_what_the_weights_have_moved_by(bits: int, per_channel: bool) -> None:
    random = np.random.default_rng(bits)
    low, high = code_range(bits)
    step = random.uniform(0.01, 0.1, 4 if per_channel else ()).astype(np.float32)
    sent, trained = (
        QuantizedLayer(random.integers(low, high + 1, (4, 3, 2, 2)).astype(np.uint8), bits, np.asarray(step))
        for _ in range(2)
    )
    fractions = random.integers(-128, 128, 48).astype(np.int8)
    change = change_of(sent, trained, fractions)
    found = change_in_weights(change, sent)
    assert found.dtype == np.float32
    assert found.shape == (4, 3, 2, 2)
    steps, wholes = (
        np.broadcast_to(each.astype(np.float64).reshape(-1), 4).reshape(4, 1, 1, 1)
        for each in (step, change.step)
    )
    np.testing.assert_allclose(found, wholes * (change.codes - zero_point(bits)) * steps / 256, rtol=1e-6)
    real = trained.weights() - sent.weights() + fractions.reshape(4, 3, 2, 2) / 256 * steps
    inside = np.abs(real) <= wholes * steps / 256 * (high - zero_point(bits))
    assert (np.abs(found - real) <= wholes * steps / 512 * (1 + 1e-4))[inside].all()
    assert inside.mean() >= 0.5


@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_weights_end_within_the_cells_of_the_codes_that_the_client_ended_with(
    seed: int, bits: int, per_channel: bool
) -> None:
    random = np.random.default_rng(seed)
    weights = random.normal(0, 0.3, (3, 7)).astype(np.float32)
    sent = QuantizedLayer.from_weights(weights, bits, "least_error", per_channel)
    low, high = code_range(bits)
    trained = np.clip(sent.codes + random.integers(-1, 2, (3, 7)), low, high).astype(np.uint8)
    fractions = random.integers(-128, 128, 21).astype(np.int8)
    change = change_of(sent, QuantizedLayer(trained, bits, sent.step), fractions)
    moved = change_in_weights(change, sent)
    ended = quantize(sent.weights() + moved, sent.step, bits)
    found = weights + change_within_cells(weights, sent, change)
    step = sent.step.reshape(-1, 1) if per_channel else sent.step
    place = (found - dequantize(ended, sent.step, bits)) / step
    assert (np.abs(place) <= 0.5 + 1e-4)[(ended > low) & (ended < high)].all()
    assert (place >= -0.5 - 1e-4)[ended > low].all()
    assert (place <= 0.5 + 1e-4)[ended < high].all()
    free = quantize(weights + moved, sent.step, bits) == ended
    np.testing.assert_allclose((found - weights)[free], moved[free], atol=1e-5)


def test_what_gathered_under_codes_that_stayed_turns_none_over() -> None:
    """Every fraction at 100/256, every weight anywhere in its cell: all codes stay as the client had them."""
    weights = np.linspace(-0.4, 0.4, 401, dtype=np.float32).reshape(1, -1)
    sent = QuantizedLayer.from_weights(weights, 2, "max", False)
    change = change_of(sent, sent, np.full(401, 100, np.int8))
    moved = change_in_weights(change, sent)
    assert (quantize(weights + moved, sent.step, 2) != sent.codes).mean() > 0.2
    within = change_within_cells(weights, sent, change)
    # A hair inside, for what lies on the boundary may round either way.
    kept = quantize(sent.weights() + (weights + within - sent.weights()) * np.float32(0.999), sent.step, 2)
    np.testing.assert_array_equal(kept, sent.codes)
    assert within.sum() > 0


@given(
    st.integers(1, 8),
    st.sampled_from([0.0, 0.4, 3.0, 60.0, 1e4]),
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
)
def test_counting_equal_changes_finds_the_step_that_going_through_all_finds(
    bits: int, deviation: float, count: int, seed: int
) -> None:
    """Three rounds of twelve steps in geometric series, each judged by every weight."""
    change = normal(bits, deviation, count, seed)
    low, best, high = 1, spanning(change, bits), spanning(change, bits)
    for _ in range(3):
        tried = sorted({best, *(round(low * (high / low) ** (place / 11)) for place in range(12))})
        errors = [squared_error(change, step, bits) for step in tried]
        place = errors.index(min(errors))
        best, low, high = tried[place], tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    assert int(changed(change, bits).step) == best
