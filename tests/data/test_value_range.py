"""The range of measured values: codes by a formula, and one range that boards agree on."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.data.dataset import DataError
from fedmpq.data.samples import Samples, channels_first
from fedmpq.data.value_range import PIXELS, ValueRange, agreed_range, parse_range

finite = st.floats(-1e6, 1e6, width=32)
ranges = (
    st.tuples(finite, finite)
    .filter(lambda pair: pair[1] - pair[0] > 1e-2)
    .map(lambda p: ValueRange((p[0],), (p[1],)))
)


def samples(values: Any, name: str = "values") -> Samples:
    array = channels_first(name, np.asarray(values))
    return Samples(name, array, np.zeros(len(array), np.int64), ("a",))


@given(ranges, st.lists(finite, min_size=1, max_size=8))
def test_codes_are_the_nearest_of_the_range(span: ValueRange, values: list[float]) -> None:
    """Within the half of a code that rounding in float32 may err by, against fractions."""
    codes = span.codes(np.array(values, np.float32)[:, None]).ravel()
    low, high = Fraction(span.low[0]), Fraction(span.high[0])
    for value, code in zip(values, codes, strict=True):
        exact = (Fraction(float(np.float32(value))) - low) * 255 / (high - low)
        wanted = min(max(exact, Fraction(0)), Fraction(255))
        slack = (
            Fraction(1, 2) + Fraction(1, 1000) + abs(exact - wanted) / 10**6 + abs(low) / (high - low) / 10**4
        )
        assert abs(wanted - int(code)) <= slack


def test_every_channel_has_its_own() -> None:
    span = parse_range("-2..2,0..1000")
    codes = span.codes(np.array([[[-2, 0], [0, 500], [5, 1000]]], np.int16))
    assert codes.tolist() == [[[0, 0], [128, 128], [255, 255]]]
    with pytest.raises(DataError, match="3 channels, the range of values has 2"):
        span.codes(np.zeros((1, 3), np.float32))


@given(st.lists(ranges, min_size=1, max_size=5))
def test_a_range_is_written_and_read_to_the_bit(spans: list[ValueRange]) -> None:
    whole = ValueRange(tuple(s.low[0] for s in spans), tuple(s.high[0] for s in spans))
    assert parse_range(str(whole)) == whole


@pytest.mark.parametrize(
    "text", ["", "1", "2..1", "1..1", "a..b", "1..2..3", "0..1,", "nan..1", "0..inf", "0..1e39"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="range"):
        parse_range(text)


@given(
    honest=st.lists(ranges, min_size=3, max_size=9),
    lies=st.lists(st.tuples(st.floats(-9e29, 0), st.floats(1, 9e29)), max_size=4),
    order=st.randoms(),
)
def test_liars_cannot_move_it_beyond_what_the_others_say(
    honest: list[ValueRange], lies: list[tuple[float, float]], order: Any
) -> None:
    """Fewer than half; and the order in which boards report does not matter."""
    liars = [ValueRange((low,), (high,)) for low, high in lies[: (len(honest) - 1) // 2]]
    reported = [*honest, *liars]
    order.shuffle(reported)
    found = agreed_range(reported)
    if found.low[0] < found.high[0] - 1:  # not one that had to be widened
        lows, highs = [one.low[0] for one in honest], [one.high[0] for one in honest]
        assert min(lows) - 1 <= found.low[0] <= max(lows) + 1
        assert min(highs) - 1 <= found.high[0] <= max(highs) + 1
    assert agreed_range(sorted(reported, key=lambda one: one.low)) == found


def test_the_median_is_taken_channel_by_channel() -> None:
    reported = [ValueRange((0, -10), (1, 10)), ValueRange((2, -30), (9, 50)), ValueRange((1, -20), (5, 20))]
    assert agreed_range(reported) == ValueRange((1, -20), (5, 20))
    assert agreed_range(reported[:2]) == ValueRange((1, -20), (5, 30))
    # A board with another number of channels has other data, and does not count.
    assert agreed_range([*reported, ValueRange((0,), (9,))]) == ValueRange((1, -20), (5, 20))
    with pytest.raises(DataError, match="no board has reported"):
        agreed_range([])


def test_a_constant_channel_gets_a_range_around_it() -> None:
    bounds = samples(np.full((3, 2), 7.0, np.float32)).bounds()
    assert bounds == ValueRange((6.5, 6.5), (7.5, 7.5))


def test_samples_become_codes_by_a_range_or_as_pixels() -> None:
    floats = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert samples(floats).coded().images.ravel().tolist() == [0, 128, 255]
    assert samples(floats).coded(PIXELS).images.ravel().tolist() == [0, 128, 255]
    assert samples(floats).bounds() == ValueRange((-0.5, 0.0, 0.5), (0.5, 1.0, 1.5))
    whole = samples(np.array([[-32768, 0, 32767]], np.int16))
    assert whole.coded(parse_range("-32768..32767")).images.ravel().tolist() == [0, 128, 255]
    with pytest.raises(DataError, match=r"values: the values are int16 and span -32768..32767"):
        whole.coded()
    codes = samples(np.array([[3, 200]], np.uint8))
    assert codes.coded(parse_range("0..9")).images.ravel().tolist() == [3, 200]
    assert codes.bounds() is None
    for bad in (np.nan, np.inf, 2e30):
        with pytest.raises(DataError, match="NaN, infinity or more than"):
            samples(np.array([[bad]], np.float64)).coded(parse_range("0..9"))
    with pytest.raises(DataError, match="int32, must be uint8, int16 or floats"):
        samples(np.zeros((1, 2), np.int32))


def test_channels_first() -> None:
    image = np.arange(24).reshape(1, 2, 3, 4)
    assert channels_first("a", image).shape == (1, 3, 4, 2)
    series = channels_first("a", np.arange(6).reshape(1, 2, 3))
    assert series.shape == (1, 1, 3, 2)
    assert series[0, 0, :, 1].tolist() == [3, 4, 5]
    assert channels_first("a", np.zeros((5, 7))).shape == (5, 1, 1, 7)
    with pytest.raises(DataError, match="a: samples have shape"):
        channels_first("a", np.zeros(3))
