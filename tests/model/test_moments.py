"""The moments of clipped normal variables, against draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model.batch_statistics import Moments

moderate = st.floats(-30, 30)


def moments(mean: float, variance: float) -> Moments:
    return Moments(np.array([mean]), np.array([variance]))


@pytest.mark.parametrize(
    ("mean", "deviation", "low", "high"),
    [
        (0.0, 1.0, 0.0, 1e9),
        (0.3, 0.7, 0.0, 1.0),
        (-1.5, 1.0, 0.0, 6.0),
        (2.0, 3.0, -1.0, 1.5),
        (5.0, 0.5, 0.0, 4.0),
        (-0.2, 2.0, -0.5, 0.5),
    ],
)
def test_clipped_moments_are_those_of_clipped_draws(
    mean: float, deviation: float, low: float, high: float
) -> None:
    draws = np.clip(np.random.default_rng(0).normal(mean, deviation, 1_000_000), low, high)
    clipped = moments(mean, deviation**2).clipped(low, high)
    spread = draws.std()
    assert clipped.mean[0] == pytest.approx(draws.mean(), abs=5e-3 * spread)
    assert clipped.variance[0] == pytest.approx(spread**2, rel=0.02)


@given(moderate, st.floats(0, 100), moderate, st.floats(1e-3, 60))
def test_clipped_moments_keep_to_their_bounds(mean: float, variance: float, low: float, width: float) -> None:
    high = low + width
    clipped = moments(mean, variance).clipped(low, high)
    rounding = 1e-11
    assert low - rounding <= clipped.mean[0] <= high + rounding
    assert 0 <= clipped.variance[0] <= width**2 / 4 + rounding
    # Clipping brings no two values further apart.
    assert clipped.variance[0] <= variance + rounding
    # What is mirrored before is mirrored after.
    mirrored = moments(-mean, variance).clipped(-high, -low)
    assert mirrored.mean[0] == pytest.approx(-clipped.mean[0], abs=rounding)
    assert mirrored.variance[0] == pytest.approx(clipped.variance[0], abs=rounding)


@given(moderate, st.floats(1e-6, 1000))
def test_wide_bounds_clip_nothing(mean: float, variance: float) -> None:
    clipped = moments(mean, variance).clipped(-1e9, 1e9)
    assert clipped.mean[0] == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert clipped.variance[0] == pytest.approx(variance, rel=1e-6, abs=1e-11)


@given(moderate, st.sampled_from([0.0, 1e-300, 1e-40, 1e-24]), moderate, st.floats(1e-3, 60))
def test_without_variance_a_value_is_clipped_as_it_is(
    mean: float, variance: float, low: float, width: float
) -> None:
    clipped = moments(mean, variance).clipped(low, low + width)
    assert clipped.mean[0] == pytest.approx(np.clip(mean, low, low + width), abs=1e-9)
    assert clipped.variance[0] == pytest.approx(0, abs=1e-9)
