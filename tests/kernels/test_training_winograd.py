"""Winograd's form of a convolution gives the sums of the plain products, whichever is faster."""

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
def winograd() -> Iterator[None]:
    kernels.force_bit_serial(0)
    kernels.force_winograd(1)
    yield
    kernels.force_winograd(-1)
    kernels.force_bit_serial(-1)


def layer(conv: Conv, zero: int, bits: int, seed: int, extremes: bool = False) -> reference.Problem:
    made = reference.problem(conv, True, zero, bits, seed, extremes)
    codes = np.random.default_rng(seed).integers(0, 2**bits, made.weights.shape).astype(np.uint8)
    return reference.Problem(conv, made.stored, True, zero, grid.integer_weights(codes, bits), made.errors)


@st.composite
def problems(draw: st.DrawFn) -> reference.Problem:
    """Most have what the form needs; some have an odd width, a zero point, a stride or too many bits."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kernel, padding = (draw(st.integers(1, 4)), 3), (draw(st.integers(0, 1)), draw(st.integers(1, 2)))
    channels, stride = draw(st.sampled_from([16, 32, 48, 8])), draw(st.sampled_from([1, 1, 1, 2]))
    height = max(height, kernel[0])
    conv = Conv.over(
        draw(st.integers(1, 3)),
        (channels, height, width),
        out_channels=draw(st.sampled_from([1, 16, 17, 40, 64])),
        kernel=kernel,
        padding=padding,
        stride=(1, stride),
    )
    zero, bits = draw(st.sampled_from([0, 0, 0, 8])), draw(st.integers(1, 8))
    return layer(conv, zero, bits, draw(st.integers(0, 2**32 - 1)), draw(st.booleans()))


def forward(problem: reference.Problem, threads: int) -> reference.Array:
    acc = np.full(problem.conv.images * problem.conv.outputs, 77, np.int32)
    training.conv_forward(problem.conv, problem.stored_codes, problem.weights, threads, acc)
    return acc


@pytest.mark.usefixtures("winograd")
@per_isa
@given(problems(), st.integers(1, 3))
def test_forward_is_the_exact_sum(isa: str, problem: reference.Problem, threads: int) -> None:
    expected = reference.conv_forward(problem.conv, problem.codes, problem.weights)
    np.testing.assert_array_equal(forward(problem, threads), expected.reshape(-1))


@pytest.mark.usefixtures("winograd")
@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1), (-1, 1, -1), (1, 1, -1)])
@pytest.mark.parametrize("weight", [42, 43, 127])
@pytest.mark.parametrize("code", [0, 15])
def test_nothing_saturates(isa: str, signs: tuple[int, ...], weight: int, code: int) -> None:
    """Three weights of 42 add up to a byte, three of 43 do not."""
    conv = Conv.over(2, (64, 6, 8), out_channels=48, kernel=(3, 3), padding=(1, 1))
    weights = np.tile(np.array(signs) * weight, (48, 64, 3, 1)).astype(np.int8)
    stored = np.full((2, 6, 8, 64), code, np.uint8)
    stored[:, ::2, 1::3] = 15 - code
    problem = reference.Problem(conv, stored, True, 0, weights, np.zeros((2, 6, 8, 48), np.int8))
    expected = reference.conv_forward(conv, problem.codes, weights)
    np.testing.assert_array_equal(forward(problem, 2), expected.reshape(-1))


@pytest.mark.parametrize("size", [4, 8, 16, 32])
@pytest.mark.parametrize("bits", [2, 4, 5, 6])
def test_both_forms_agree_on_layers_of_real_size(isa: str, size: int, bits: int) -> None:
    conv = Conv.over(3, (64 * 8 // size, size, size), out_channels=80, kernel=(3, 3), padding=(1, 1))
    problem, results = layer(conv, 0, bits, size), []
    for how in (0, 1, -1):
        kernels.force_winograd(how)
        results.append(forward(problem, 2).tobytes())
    assert len(set(results)) == 1
