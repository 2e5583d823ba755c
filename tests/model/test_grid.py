"""The grid: codes, steps and the two rules that choose a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from fedmpq.model import grid

Weights = NDArray[np.float32]

BITS = range(1, 9)
SHAPES = st.sampled_from([(1,), (7,), (1, 1), (1, 13), (3, 5), (5, 1, 1, 1), (2, 3, 3, 1), (4, 2, 3, 3)])
# Any magnitude from where MIN_STEP takes over up to far beyond what training gives.
MAGNITUDES = st.sampled_from([1e-12, 1e-4, 0.05, 1.0, 3e3, 1e9])


@st.composite
def weights_of_any_kind(draw: st.DrawFn) -> Weights:
    unit = st.floats(-1, 1, width=32, allow_subnormal=False)
    drawn = draw(npst.arrays(np.float32, draw(SHAPES), elements=unit))
    return (drawn * np.float32(draw(MAGNITUDES))).astype(np.float32)


def highest(bits: int) -> float:
    """The largest weight, in steps, that a grid represents to within half a step."""
    return 127.5 if bits == 8 else (2**bits - 1) / 2


def steps_along(step: NDArray[np.float32], weights: Weights) -> NDArray[np.float64]:
    per_row = np.broadcast_to(step, (len(weights),)).astype(np.float64)
    return per_row.reshape(-1, *[1] * (weights.ndim - 1))


def squared_error(weights: Weights, step: float, bits: int) -> float:
    """By the definition, in float64."""
    zero = 128.0 if bits == 8 else (2**bits - 1) / 2
    low, high = (1, 255) if bits == 8 else (0, 2**bits - 1)
    exact = weights.astype(np.float64)
    codes = np.clip(np.rint(exact / step + zero), low, high)
    return float(np.square(exact - step * (codes - zero)).sum())


@given(weights_of_any_kind(), st.integers(1, 8), st.booleans(), st.sampled_from(["max", "least_error"]))
def test_a_weight_inside_the_range_moves_by_at_most_half_a_step(
    weights: Weights, bits: int, per_channel: bool, rule: grid.StepRule
) -> None:
    step = grid.STEP_RULES[rule](weights, bits, per_channel)
    assert step.shape == ((len(weights),) if per_channel else ())
    assert step.dtype == np.float32
    codes = grid.quantize(weights, step, bits)
    assert codes.dtype == np.uint8
    again = grid.dequantize(codes, step, bits)
    assert again.dtype == np.float32
    assert codes.shape == again.shape == weights.shape
    steps = steps_along(step, weights)
    inside = np.abs(weights) <= highest(bits) * steps
    if rule == "max":
        assert inside.all() or np.allclose(np.abs(weights).max(), highest(bits) * steps.max())
    # float32 has 24 bits, of which a code takes up to 8.
    tolerance = (0.5 + 2.0**-14) * steps
    assert (np.abs(again.astype(np.float64) - weights) <= tolerance)[inside].all()


@given(weights_of_any_kind(), st.integers(1, 8), st.floats(2.0**-30, 1e3, width=32))
def test_a_weight_outside_the_range_gets_the_nearest_end(weights: Weights, bits: int, step: float) -> None:
    codes = grid.quantize(weights, np.float32(step) * np.ones((), np.float32), bits)
    low, high = grid.code_range(bits)
    assert ((codes >= low) & (codes <= high)).all()
    assert (codes[weights > (highest(bits) + 0.01) * step] == high).all()
    assert (codes[weights < -(highest(bits) + 0.01) * step] == low).all()


@given(st.integers(1, 8), st.floats(2.0**-30, 1e6, width=32))
def test_every_code_survives_the_round_trip(bits: int, step: float) -> None:
    low, high = grid.code_range(bits)
    codes = np.arange(low, high + 1, dtype=np.uint8).reshape(-1, 1)
    one = np.array(step, np.float32)
    np.testing.assert_array_equal(grid.quantize(grid.dequantize(codes, one, bits), one, bits), codes)
    per_channel = np.linspace(step, 2 * step, len(codes), dtype=np.float32)
    weights = grid.dequantize(codes, per_channel, bits)
    np.testing.assert_array_equal(grid.quantize(weights, per_channel, bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_the_grid_is_symmetric(bits: int) -> None:
    low, high = grid.code_range(bits)
    values = grid.dequantize(np.arange(low, high + 1, dtype=np.uint8), np.array(0.5, np.float32), bits)
    np.testing.assert_array_equal(values, -values[::-1])
    assert len(values) == (255 if bits == 8 else 2**bits)
    np.testing.assert_array_equal(np.diff(values), np.full(len(values) - 1, 0.5, np.float32))


def test_one_bit_is_a_useful_pair() -> None:
    step = np.array(0.5, np.float32)
    assert grid.dequantize(np.array([0, 1], np.uint8), step, 1).tolist() == [-0.25, 0.25]
    assert grid.quantize(np.array([-3.0, -0.1, 0.1, 3.0], np.float32), step, 1).tolist() == [0, 0, 1, 1]


@given(st.integers(1, 8), st.floats(2.0**-30, 1e6, width=32))
def test_integer_weights_are_the_same_weights(bits: int, step: float) -> None:
    low, high = grid.code_range(bits)
    codes = np.arange(low, high + 1, dtype=np.uint8)
    steps = np.array(step, np.float32)
    integers = grid.integer_weights(codes, bits)
    assert integers.dtype == np.int8
    assert np.abs(integers.astype(int)).max() == (127 if bits == 8 else 2**bits - 1)
    assert bits == 8 or (integers % 2 != 0).all()
    real = integers.astype(np.float32) * grid.integer_scale(steps, bits)
    np.testing.assert_array_equal(real, grid.dequantize(codes, steps, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", ["max", "least_error"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_zeros_have_a_grid(bits: int, rule: grid.StepRule, per_channel: bool) -> None:
    weights = np.zeros((3, 2, 3, 3), np.float32)
    step = grid.STEP_RULES[rule](weights, bits, per_channel)
    assert (step == grid.MIN_STEP).all()
    again = grid.dequantize(grid.quantize(weights, step, bits), step, bits)
    assert np.abs(again).max() == (0 if bits == 8 else grid.MIN_STEP / 2)


def test_a_channel_of_zeros_beside_others() -> None:
    weights = np.array([[0, 0, 0], [1, -2, 3]], np.float32)
    for rule in grid.STEP_RULES.values():
        step = rule(weights, 4, True)
        assert step[0] == grid.MIN_STEP
        assert 0.1 < step[1] <= np.float32(2 / 15) * 3


@given(weights_of_any_kind(), st.integers(1, 8))
def test_the_max_step_is_the_papers(weights: Weights, bits: int) -> None:
    largest = float(np.abs(weights.astype(np.float64)).max())
    expected = max(2 * largest / (2**bits - 1), 2.0**-30)
    assert float(grid.max_step(weights, bits)) == pytest.approx(expected, rel=1e-6)


@given(weights_of_any_kind(), st.integers(1, 8), st.sampled_from(["max", "least_error"]))
def test_a_step_per_channel_is_the_step_of_that_channel_alone(
    weights: Weights, bits: int, rule: grid.StepRule
) -> None:
    together = grid.STEP_RULES[rule](weights, bits, True)
    alone = [grid.STEP_RULES[rule](row[None], bits, False) for row in weights]
    np.testing.assert_array_equal(together, np.stack(alone))


@given(weights_of_any_kind(), st.integers(1, 8), st.booleans())
def test_least_error_is_never_worse_than_max(weights: Weights, bits: int, per_channel: bool) -> None:
    rows = list(weights) if per_channel else [weights]
    least = np.atleast_1d(grid.least_error_step(weights, bits, per_channel))
    spanning = np.atleast_1d(grid.max_step(weights, bits, per_channel))
    for row, mine, other in zip(rows, least, spanning, strict=True):
        # The search adds up errors in float32, each of them rounded at the size of the weight.
        slack = row.size * (2.0**-22 * float(np.abs(row).max())) ** 2
        allowed = squared_error(row, float(other), bits) * (1 + 1e-4) + slack
        assert squared_error(row, float(mine), bits) <= allowed


def _outliers(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    values = random.normal(size=count)
    values[::500] *= 30
    return values


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "normal": lambda random, count: random.normal(size=count),
    "uniform": lambda random, count: random.uniform(-1, 1, count),
    "laplace": lambda random, count: random.laplace(size=count),
    "heavy tails": lambda random, count: random.standard_t(2, count),
    "off centre": lambda random, count: random.uniform(0.5, 1.5, count),
    "sparse": lambda random, count: random.normal(size=count) * (random.random(count) < 0.1),
    "two clusters": lambda random, count: random.choice([-1, 1], count) + 0.1 * random.normal(size=count),
    "outliers": _outliers,
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_least_error_is_near_the_best_of_a_fine_search(name: str, bits: int) -> None:
    random = np.random.default_rng(bits)
    weights = (0.07 * DISTRIBUTIONS[name](random, 2000)).astype(np.float32)
    mine = squared_error(weights, float(grid.least_error_step(weights, bits)), bits)
    spanning = float(grid.max_step(weights, bits))
    best = min(squared_error(weights, step, bits) for step in np.geomspace(0.02 * spanning, spanning, 700))
    assert mine <= 1.05 * best


@pytest.mark.parametrize(
    ("bits", "expected"), [(1, 1.5958), (2, 0.9957), (3, 0.5860), (4, 0.3352), (5, 0.1881)]
)
def test_least_error_of_a_normal_layer_is_the_textbook_step(bits: int, expected: float) -> None:
    """J. Max, "Quantizing for minimum distortion" (1960), table II: uniform output levels, unit variance."""
    weights = np.random.default_rng(0).normal(size=(64, 64, 5, 5)).astype(np.float32)
    assert float(grid.least_error_step(weights, bits)) == pytest.approx(expected, rel=0.03)


def test_the_sample_of_a_large_layer_holds_every_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the stride a multiple of 9, the search would see one tap of each 3x3 kernel and no other."""
    monkeypatch.setattr(grid, "_SEARCHED", 1024)
    weights = np.random.default_rng(1).normal(size=(64, 64, 3, 3)).astype(np.float32)
    weights[:, :, 0, 0] *= 0.001
    for bits in (2, 4, 8):
        mine = squared_error(weights, float(grid.least_error_step(weights, bits)), bits)
        spanning = float(grid.max_step(weights, bits))
        candidates = np.geomspace(0.1 * spanning, spanning, 60)
        assert mine <= 1.1 * min(squared_error(weights, step, bits) for step in candidates)


@pytest.mark.parametrize("bits", BITS)
def test_a_sample_that_misses_the_large_weights_does_no_harm(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "_SEARCHED", 16)
    weights = np.random.default_rng(3).normal(size=2000).astype(np.float32)
    weights[1:21] = 10
    spanning = squared_error(weights, float(grid.max_step(weights, bits)), bits)
    assert squared_error(weights, float(grid.least_error_step(weights, bits)), bits) <= spanning * (1 + 1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_layout_in_memory_does_not_matter(bits: int) -> None:
    base = np.random.default_rng(2).normal(size=(6, 5, 4, 3)).astype(np.float32)
    view = base.transpose(1, 0, 3, 2)[::2, ::-1]
    copy = np.ascontiguousarray(view)
    for rule in grid.STEP_RULES.values():
        for per_channel in (False, True):
            step = rule(view, bits, per_channel)
            np.testing.assert_array_equal(step, rule(copy, bits, per_channel))
            codes = grid.quantize(view, step, bits)
            np.testing.assert_array_equal(codes, grid.quantize(copy, step, bits))
            again = grid.dequantize(np.asfortranarray(codes), step, bits)
            np.testing.assert_array_equal(again, grid.dequantize(codes, step, bits))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_diverged_weights_are_refused(bad: float) -> None:
    weights = np.array([[0.5, bad], [1, 2]], np.float32)
    for rule in grid.STEP_RULES.values():
        for per_channel in (False, True):
            with pytest.raises(grid.GridError, match="finite"):
                rule(weights, 4, per_channel)
    with pytest.raises(grid.GridError, match="finite"):
        grid.quantize(weights, np.array(0.1, np.float32), 4)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_step_that_is_none_is_refused(bad: float) -> None:
    weights = np.ones((2, 2), np.float32)
    for step in (np.array(bad, np.float32), np.array([1, bad], np.float32)):
        with pytest.raises(grid.GridError, match="positive and finite"):
            grid.quantize(weights, step, 4)


@pytest.mark.parametrize("bits", [-1, 0, 9])
def test_bit_widths_outside_1_to_8_are_refused(bits: int) -> None:
    weights, step = np.ones((2, 2), np.float32), np.array(1, np.float32)
    codes = np.ones((2, 2), np.uint8)
    calls: list[Callable[[], object]] = [
        lambda: grid.max_step(weights, bits),
        lambda: grid.least_error_step(weights, bits),
        lambda: grid.quantize(weights, step, bits),
        lambda: grid.dequantize(codes, step, bits),
        lambda: grid.integer_weights(codes, bits),
        lambda: grid.integer_scale(step, bits),
        lambda: grid.code_range(bits),
    ]
    for call in calls:
        with pytest.raises(grid.GridError, match=rf"bit-width {bits} is outside 1\.\.8"):
            call()


def test_a_layer_without_weights_is_refused() -> None:
    for rule in grid.STEP_RULES.values():
        with pytest.raises(grid.GridError, match="without weights"):
            rule(np.zeros((0, 3), np.float32), 4, True)
    empty = grid.quantize(np.zeros((0, 3), np.float32), np.array(1, np.float32), 4)
    assert empty.shape == (0, 3)
