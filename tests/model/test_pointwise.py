"""Pointwise functions: near the truth, torch's slopes, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model import pointwise
from fedmpq.model.activations import CodeFormat
from fedmpq.model.lookup_tables import code_table, real_tables
from fedmpq.model.ops import Lookup
from fedmpq.model.pointwise import FUNCTIONS, evaluated
from tests.functions import PARAMETERS, SLOW, TORCH

UNIT = 2.0**-52
moderate = st.floats(-40, 40)


def only(values: pointwise.Reals) -> float:
    return float(values[0])


@given(moderate)
def test_exp_erf_and_tanh_are_within_units_of_the_last_place(x: float) -> None:
    """Against 50 digits."""
    with mpmath.workdps(50):
        power = only(pointwise.exponential(np.array([x])))
        assert abs(power / mpmath.exp(x) - 1) < 2 * UNIT
        error = only(pointwise.error_function(np.array([x])))
        assert abs(error - mpmath.erf(x)) < 12 * UNIT * abs(mpmath.erf(x)) + 1e-16
        tangent = only(pointwise.hyperbolic_tangent(np.array([x])))
        assert abs(tangent - mpmath.tanh(x)) < 2 * UNIT


@given(st.floats(2.0**-1000, 2.0**1000))
def test_the_logarithm_is_within_units_of_the_last_place(x: float) -> None:
    with mpmath.workdps(50):
        truth = mpmath.log(x)
        found = only(pointwise.logarithm(np.array([x])))
        assert abs(found - truth) < 2 * UNIT * abs(truth) + 1e-17


def test_the_logarithms_of_counts_are_the_same_bits_everywhere() -> None:
    """Boards and simulations add them to logits: another last bit would be another model."""
    counts = np.arange(1, 10_001, dtype=np.float64)
    digest = hashlib.sha256(pointwise.logarithm(counts / 10_010.0).tobytes()).hexdigest()
    assert digest == "e0331ddfeb39f7e19e4a97c3b1893731f519b20c46c672f95bc4f597c4d51b90"


def test_beyond_their_ranges_they_are_at_their_limits() -> None:
    far = np.array([-1e300, 1e300])
    np.testing.assert_array_equal(pointwise.error_function(far), [-1, 1])
    np.testing.assert_array_equal(pointwise.hyperbolic_tangent(far), [-1, 1])
    low, high = pointwise.exponential(far)
    assert 0 < low < 1e-300 < 1e300 < high < math.inf


@pytest.mark.parametrize("function", FUNCTIONS)
@given(st.lists(moderate, min_size=1, max_size=20), st.floats(0, 4, width=32))
def test_values_and_slopes_are_torchs(function: str, points: list[float], parameter: float) -> None:
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    expected = TORCH[function](x, parameter)
    (slopes,) = torch.autograd.grad(expected.sum(), x)
    value, slope = evaluated(function, parameter, np.array(points))
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-13, atol=1e-13)
    # torch rounds a sixth to float32.
    np.testing.assert_allclose(slope, slopes.numpy(), rtol=1e-12, atol=1e-8)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_known_of_their_values_is_true(function: str) -> None:
    known, x = FUNCTIONS[function], np.linspace(-50, 50, 2001)
    values, _ = evaluated(function, 0.5, x)
    assert (values.min() < 0) == known.negative
    assert np.abs(values).max() <= known.bound if known.bound else np.abs(values).max() > 40


FORMATS = st.builds(
    lambda scale, span: CodeFormat(np.float32(scale), *span),
    st.floats(2**-16, 2, width=32),
    st.sampled_from([(0, 15), (0, 255), (-127, 127), (-7, 7), (-33, 222)]),
)


@pytest.mark.parametrize("function", FUNCTIONS)
@given(FORMATS, FORMATS)
def test_a_table_has_the_nearest_code_of_each_value(
    function: str, source: CodeFormat, target: CodeFormat
) -> None:
    parameter = PARAMETERS.get(function, 0.0)
    values, _ = real_tables(Lookup(function, parameter), source)
    table = code_table(values, target)
    assert table.shape == (source.high - source.low + 1,)
    for code, found in zip(range(source.low, source.high + 1), table.tolist(), strict=True):
        real = SLOW[function](code * float(source.scale), parameter) / float(target.scale)
        nearest = min(max(round(real), target.low), target.high)
        # Next to a tie the last place decides, and the standard library's is another.
        tie = abs(real % 1 - 0.5) < 1e-9 * (1 + abs(real))
        assert abs(found - nearest) <= (1 if tie else 0), (code, real)


def test_tables_are_the_same_on_every_machine() -> None:
    """The bits of every function at 20000 points; whoever computes others must not take part in a run."""
    digest = hashlib.sha256()
    x = np.arange(-10_000, 10_000) * np.float64(np.float32(0.0047))
    for function in FUNCTIONS:
        for values in evaluated(function, PARAMETERS.get(function, 0.0), x):
            digest.update(values.astype("<f8").tobytes())
    assert digest.hexdigest() == "46d8dd8b0e15b75d6faf4f4310a167a3918f7fc2d324646525464107ef5cad19"
