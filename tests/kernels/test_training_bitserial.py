"""The bit-serial form of a convolution gives the sums of the byte products, whichever is faster."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq import kernels
from fedmpq.kernels.tensors import Conv
from fedmpq.model import grid
from tests.kernels import training_calls as training
from tests.kernels import training_reference as reference

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def bit_serial() -> Iterator[None]:
    kernels.force_bit_serial(7)
    yield
    kernels.force_bit_serial(-1)


@st.composite
def problems(draw: st.DrawFn) -> reference.Problem:
    """4-bit codes with whole bytes of inputs a plane, and weights of fewer than 8 bits."""
    conv = draw(reference.convolutions())
    inputs = draw(st.sampled_from([8, 16, 24, 64, 72]))
    groups = draw(st.sampled_from([1, 1, 2]))
    conv.groups, conv.channels = groups, groups * inputs
    conv.out_channels = groups * draw(st.sampled_from([1, 16, 17, 40]))
    bits, seed = draw(st.integers(1, 7)), draw(st.integers(0, 2**32 - 1))
    made = reference.problem(conv, True, draw(st.sampled_from([0, 8])), bits, seed, draw(st.booleans()))
    codes = np.random.default_rng(seed).integers(0, 2**bits, made.weights.shape).astype(np.uint8)
    weights = grid.integer_weights(codes, bits)
    return reference.Problem(conv, made.stored, True, made.zero, weights, made.errors)


def forward(problem: reference.Problem, threads: int) -> reference.Array:
    acc = np.full(problem.conv.images * problem.conv.outputs, 77, np.int32)
    training.conv_forward(problem.conv, problem.stored_codes, problem.weights, threads, acc)
    return acc


@pytest.mark.usefixtures("bit_serial")
@per_isa
@given(problems(), st.integers(1, 3))
def test_forward_is_the_exact_sum(isa: str, problem: reference.Problem, threads: int) -> None:
    expected = reference.conv_forward(problem.conv, problem.codes, problem.weights)
    np.testing.assert_array_equal(forward(problem, threads), expected.reshape(-1))


@pytest.mark.usefixtures("bit_serial")
@pytest.mark.parametrize("bits", [1, 3, 7])
def test_more_words_than_counts_fit_in_a_byte(isa: str, bits: int) -> None:
    """31 words of 64 inputs, all ones, fill a byte's counts; this has 90."""
    conv = Conv(1, 5, 5, 640, 3, 3, 16, 3, 3, 1, 1, 0, 0, 1, 1, 1)
    weights = np.full((16, 640, 3, 3), 2**bits - 1, np.int8)
    weights[::3] *= -1
    stored = np.full((1, 5, 5, 640), 15, np.uint8)
    problem = reference.Problem(conv, stored, True, 0, weights, np.zeros((1, 3, 3, 16), np.int8))
    expected = 640 * 9 * 15 * weights[:, 0, 0, 0].astype(np.int64)
    assert (forward(problem, 1).reshape(9, 16) == expected).all()


@pytest.mark.usefixtures("bit_serial")
@pytest.mark.parametrize("even", [0, 2, -126])
def test_weights_that_are_no_codes_take_the_other_way(isa: str, even: int) -> None:
    conv = Conv(2, 4, 4, 16, 4, 4, 17, 3, 3, 1, 1, 1, 1, 1, 1, 1)
    problem = reference.problem(conv, True, 0, 1, 3, extremes=False)
    problem.weights[:] = np.where(problem.weights == 0, 1, problem.weights)
    problem.weights[5, 3, 2, 1] = even
    expected = reference.conv_forward(conv, problem.codes, problem.weights)
    np.testing.assert_array_equal(forward(problem, 1), expected.reshape(-1))
