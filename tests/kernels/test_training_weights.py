"""Products read a layer's codes: they come out as those of the integer weights that the codes stand for."""

from __future__ import annotations

from ctypes import c_uint32
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.kernels import bound
from fedmpq.kernels.bound import Weights
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.tensors import Conv, Normalize, Rescale, WeightCodes
from fedmpq.model import grid
from tests.kernels import training_reference as reference
from tests.kernels.training_reference import Problem, problems

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]

# Every way in which weights are packed: quads side by side, rows interleaved, four outputs at once, one
# weight after the other; kernels of more taps than a vector has bytes; what is left of four and of sixteen.
SHAPES = [
    Conv.over(2, (16, 5, 5), out_channels=32),
    Conv.over(2, (20, 3, 4), out_channels=21),
    Conv.over(1, (36, 1, 1), out_channels=10),
    Conv.over(2, (16, 6, 8), out_channels=16, kernel=(3, 3), padding=(1, 1)),
    Conv.over(1, (12, 6, 6), out_channels=22, kernel=(3, 3), padding=(1, 1), stride=(2, 2)),
    Conv.over(1, (8, 7, 7), out_channels=20, kernel=(5, 5), padding=(2, 2)),
    Conv.over(1, (4, 6, 6), out_channels=4, kernel=(4, 4)),
    Conv.over(1, (16, 1, 9), out_channels=8, kernel=(1, 3), dilation=(1, 2)),
    Conv.over(1, (3, 9, 9), out_channels=16, kernel=(3, 3), padding=(1, 1), stride=(2, 2)),
    Conv.over(1, (24, 4, 4), out_channels=48, kernel=(3, 3), padding=(1, 1), groups=2),
    Conv.over(2, (20, 6, 6), out_channels=20, kernel=(3, 3), padding=(1, 1), groups=20),
]


def layer(problem: Problem, bits: int, seed: int) -> tuple[Problem, WeightCodes]:
    """The same with random codes of so many bits for weights."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, problem.weights.shape).astype(np.uint8)
    if bits == 8:
        codes = np.maximum(codes, 1)
    integers = grid.integer_weights(codes, bits)
    held = Problem(problem.conv, problem.stored, problem.pairs, problem.zero, integers, problem.errors)
    return held, WeightCodes(codes.reshape(-1), c_uint32(bits))


def results(problem: Problem, weights: Weights, threads: int) -> list[Array]:
    """Accumulators with their sums, the same again with sums of errors, and the errors of the input."""
    conv, codes, rng = problem.conv, problem.stored_codes, np.random.default_rng(3)
    channels, count = conv.out_channels, conv.images * conv.outputs
    error = reference.halved(rng.normal(size=count).astype(np.float32))
    numbers = [rng.uniform(0.001, 0.1, channels).astype(np.float32) for _ in range(4)]
    acc, again = np.empty((2, count), np.int32)
    sums, more = np.empty((2, channels)), np.empty((4, channels))
    passed = np.empty(conv.images * conv.inputs, np.uint16)
    rescale, normalize = Rescale(numbers[0], numbers[1], 0, 15), Normalize(numbers[2], numbers[3])
    bound.conv_forward(conv, codes, weights, threads, acc, sums)()
    bound.conv_backward_sums(conv, codes, weights, None, error, rescale, normalize, threads, again, more)()
    bound.conv_backward_input(conv, problem.errors.reshape(-1), weights, 0.5, False, threads, passed)()
    return [acc, sums, again, more, passed]


def assert_same(problem: Problem, codes: WeightCodes, threads: int) -> None:
    found = results(problem, codes, threads)
    expected = reference.conv_forward(problem.conv, problem.codes, problem.weights).reshape(-1)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[2], expected)
    errors = reference.conv_backward_input(problem.conv, problem.errors, problem.weights).reshape(-1)
    np.testing.assert_array_equal(found[4], reference.halved(errors.astype(np.float32) * np.float32(0.5)))
    for own, other in zip(found, results(problem, problem.weights, 1), strict=True):
        np.testing.assert_array_equal(own, other)


@per_isa
@given(problems(), st.integers(1, 8), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_codes_are_multiplied_as_their_weights(
    isa: str, problem: Problem, bits: int, seed: int, threads: int
) -> None:
    assert_same(*layer(problem, bits, seed), threads)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(
    "conv", SHAPES, ids=lambda c: f"{c.channels}-{c.out_channels}-{c.kernel_h}x{c.kernel_w}"
)
def test_every_way_of_packing_reads_codes(isa: str, conv: Conv, pairs: bool, bits: int) -> None:
    made = reference.problem(conv, pairs, 0 if pairs else 9, bits, 5, False)
    assert_same(*layer(made, bits, 11), 1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_planes_are_those_of_codes(isa: str, bits: int) -> None:
    made = reference.problem(SHAPES[3], True, 0, bits, 5, False)
    kernels.force_bit_serial(7)
    try:
        assert_same(*layer(made, bits, 11), 1)
    finally:
        kernels.force_bit_serial(-1)


def test_bits_are_read_when_a_call_is_made() -> None:
    made = reference.problem(SHAPES[3], True, 0, 2, 5, False)
    problem, codes = layer(made, 2, 11)
    acc = np.empty(problem.conv.images * problem.conv.outputs, np.int32)
    call = bound.conv_forward(problem.conv, problem.stored_codes, codes, 1, acc, None)
    for bits in (2, 3, 8):
        codes.bits.value = bits
        call()
        weights = grid.integer_weights(codes.codes.reshape(problem.weights.shape), bits)
        expected = reference.conv_forward(problem.conv, problem.codes, weights)
        np.testing.assert_array_equal(acc, expected.reshape(-1))


@pytest.mark.parametrize("conv", [SHAPES[0], SHAPES[3], SHAPES[10]], ids=["1x1", "3x3", "depthwise"])
@pytest.mark.parametrize(("bits", "code"), [(1, 2), (4, 16), (7, 255), (9, 0), (2**32 - 1, 0)])
def test_codes_of_more_bits_are_refused(isa: str, conv: Conv, bits: int, code: int) -> None:
    codes = np.zeros(conv.weights, np.uint8)
    codes[-1] = code
    weights = WeightCodes(codes, c_uint32(bits))
    problem = reference.problem(conv, True, 0, 4, 5, False)
    acc = np.full(conv.images * conv.outputs, 77, np.int32)
    passed = np.full(conv.images * conv.inputs, 77, np.uint16)
    errors = problem.errors.reshape(-1)
    for call in (
        bound.conv_forward(conv, problem.stored_codes, weights, 1, acc, None),
        bound.conv_backward_input(conv, errors, weights, 1.0, False, 1, passed),
    ):
        with pytest.raises(KernelError, match="refuses its arguments"):
            call()
    assert (acc == 77).all()
    assert (passed == 77).all()
