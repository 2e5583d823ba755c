from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.tensors import Conv
from tests.kernels import training_calls as training
from tests.kernels import training_reference as reference
from tests.kernels.training_reference import Problem, problems

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
threads = st.integers(1, 3)


def forward(problem: Problem, threads: int) -> NDArray[np.int32]:
    acc = np.full(problem.conv.images * problem.conv.outputs, 77, np.int32)
    training.conv_forward(problem.conv, problem.stored_codes, problem.weights, threads, acc)
    return acc


def backward_input(problem: Problem, scale: float, add: bool, threads: int) -> NDArray[np.uint16]:
    out = errors_there(problem)
    training.conv_backward_input(problem.conv, problem.errors, problem.weights, scale, add, threads, out)
    return out


def errors_there(problem: Problem) -> NDArray[np.uint16]:
    real = np.random.default_rng(0).normal(size=problem.conv.images * problem.conv.inputs)
    return reference.halved(real.astype(np.float32))


def backward_weights(problem: Problem, scale: NDArray[np.float32], threads: int) -> NDArray[np.float32]:
    gradient = np.full(problem.weights.size, 77, np.float32)
    training.conv_backward_weights(
        problem.conv, problem.stored_codes, problem.errors, scale, threads, gradient
    )
    return gradient


@per_isa
@given(problems(), threads)
def test_forward_is_the_exact_sum(isa: str, problem: Problem, threads: int) -> None:
    expected = reference.conv_forward(problem.conv, problem.codes, problem.weights)
    np.testing.assert_array_equal(forward(problem, threads), expected.reshape(-1))


@per_isa
@given(problems(), threads)
def test_statistics_are_the_sums_over_all_pixels(isa: str, problem: Problem, threads: int) -> None:
    acc = np.empty(problem.conv.images * problem.conv.outputs, np.int32)
    sums = training.conv_forward(problem.conv, problem.stored_codes, problem.weights, threads, acc, True)
    by_channel = acc.reshape(-1, problem.conv.out_channels).astype(np.int64)
    np.testing.assert_array_equal(sums, [by_channel.sum(axis=0), (by_channel**2).sum(axis=0)])


@per_isa
@given(problems(), threads, st.floats(2**-20, 2**20, width=32), st.booleans())
def test_input_errors_are_the_rounded_sum(
    isa: str, problem: Problem, threads: int, scale: float, add: bool
) -> None:
    sums = reference.conv_backward_input(problem.conv, problem.errors, problem.weights).reshape(-1)
    expected = sums.astype(np.float32) * np.float32(scale)
    if add:
        expected = expected + reference.widened(errors_there(problem))
    np.testing.assert_array_equal(backward_input(problem, scale, add, threads), reference.halved(expected))


@per_isa
@given(problems(), threads)
def test_weight_gradients_are_the_scaled_exact_sum(isa: str, problem: Problem, threads: int) -> None:
    sums = reference.conv_backward_weights(problem.conv, problem.codes, problem.errors)
    scale = np.random.default_rng(1).uniform(0.1, 10, problem.conv.out_channels).astype(np.float32)
    expected = sums.astype(np.float32) * scale[:, None, None, None]
    np.testing.assert_array_equal(backward_weights(problem, scale, threads), expected.reshape(-1))


def square(images: int, size: int, channels: int, out_channels: int, stride: int, groups: int) -> Conv:
    """A 3x3 convolution with padding 1."""
    out = reference.output_size(size, 3, stride, 1, 1)
    sizes = images, size, size, channels, out, out, out_channels
    return Conv(*sizes, 3, 3, stride, stride, 1, 1, 1, 1, groups)


SHAPES = [
    square(3, 32, 16, 16, 1, 1),
    square(2, 32, 16, 32, 2, 1),
    square(2, 8, 64, 64, 1, 1),
    square(2, 14, 144, 144, 1, 144),
    square(1, 15, 96, 96, 2, 96),
    square(2, 7, 57, 57, 1, 57),
    # Taps as far apart as pixels, by a stride of two.
    Conv(2, 19, 21, 41, 8, 9, 41, 3, 3, 2, 2, 0, 0, 2, 2, 41),
    square(2, 9, 3, 40, 1, 1),
    # One image, whose rows, and in the gradient of weights outputs, threads share.
    square(1, 32, 32, 48, 1, 1),
    square(1, 30, 24, 72, 2, 1),
    square(1, 16, 64, 64, 1, 2),
]


@pytest.mark.parametrize("conv", SHAPES, ids=lambda c: f"{c.height}-{c.channels}-{c.out_channels}-{c.groups}")
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("weight_bits", [2, 4, 5, 6, 8])
def test_instruction_sets_and_threads_agree_on_layers_of_real_size(
    conv: Conv, pairs: bool, weight_bits: int
) -> None:
    """Long enough to pass every point where narrow sums are added to wide ones."""
    before = kernels.isa()
    problem = reference.problem(conv, pairs, 0, weight_bits, 5, extremes=False)
    scale = np.ones(conv.out_channels, np.float32)
    results = []
    for isa in kernels.supported_isas():
        kernels.force_isa(isa)
        for count in (1, 2, 3, 5):
            acc = np.empty(conv.images * conv.outputs, np.int32)
            sums = training.conv_forward(conv, problem.stored_codes, problem.weights, count, acc, True)
            results.append(
                (
                    sums.tobytes(),
                    acc.tobytes(),
                    backward_input(problem, 0.37, True, count).tobytes(),
                    backward_weights(problem, scale, count).tobytes(),
                )
            )
    kernels.force_isa(before)
    assert len(set(results)) == 1


def test_tiles_of_every_size(isa: str) -> None:
    """Up to nine rows, as many as a tile takes and one more; four to seven quads; one to three blocks.

    The second image's sums are added to the first one's, in place.
    """
    for channels in (*range(1, 10), 16, 17):
        width, outputs = 16 + 4 * (channels % 4), (16, 32, 40)[channels % 3]
        conv = Conv(2, 16, width, channels, 16, width, outputs, 1, 1, 1, 1, 0, 0, 1, 1, 1)
        problem = reference.problem(conv, False, 0, 8, channels, extremes=False)
        acc = reference.conv_forward(conv, problem.codes, problem.weights).reshape(-1)
        np.testing.assert_array_equal(forward(problem, 1), acc)
        sums = reference.conv_backward_weights(conv, problem.codes, problem.errors).reshape(-1)
        gradient = backward_weights(problem, np.ones(outputs, np.float32), 1)
        np.testing.assert_array_equal(gradient, sums.astype(np.float32))


@pytest.mark.parametrize("code", [0, 255])
@pytest.mark.parametrize("weight", [-127, 127])
@pytest.mark.parametrize("error", [-127, 127])
def test_nothing_saturates(isa: str, code: int, weight: int, error: int) -> None:
    conv = square(2, 16, 64, 16, 1, 1)
    random = reference.problem(conv, False, 0, 8, 0, extremes=False)
    problem = Problem(
        conv=conv,
        stored=np.full_like(random.stored, code),
        pairs=False,
        zero=0,
        weights=np.full_like(random.weights, weight),
        errors=np.full_like(random.errors, error),
    )
    acc = reference.conv_forward(conv, problem.codes, problem.weights).reshape(-1)
    np.testing.assert_array_equal(forward(problem, 2), acc)
    errors = reference.conv_backward_input(conv, problem.errors, problem.weights).reshape(-1)
    np.testing.assert_array_equal(backward_input(problem, 1.0, False, 2), reference.halved(errors))
    sums = reference.conv_backward_weights(conv, problem.codes, problem.errors).reshape(-1)
    scale = np.ones(conv.out_channels, np.float32)
    np.testing.assert_array_equal(backward_weights(problem, scale, 2), sums.astype(np.float32))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_images_than_32_bits_hold(isa: str, threads: int) -> None:
    """Six images of 100 x 100 greatest products fill them."""
    conv = Conv(14, 100, 100, 2, 100, 100, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1)
    stored, errors = np.full((14, 100, 100, 2), 255, np.uint8), np.full((14, 100, 100, 1), -127, np.int8)
    problem = Problem(conv, stored, False, 0, np.ones((1, 2, 1, 1), np.int8), errors)
    gradient = backward_weights(problem, np.ones(1, np.float32), threads)
    np.testing.assert_array_equal(gradient, np.float32(-127 * 255 * 14 * 100 * 100))


def test_an_image_too_large_for_the_sums_of_weight_gradients_is_refused() -> None:
    side = 300  # 300 * 300 * 255 * 127 > 2^31
    conv = Conv(1, side, side, 1, side, side, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1)
    problem = reference.problem(conv, False, 0, 8, 0, extremes=True)
    with pytest.raises(KernelError, match="might not fit 32 bits"):
        backward_weights(problem, np.ones(1, np.float32), 1)


def test_buffers_of_the_wrong_kind_never_reach_the_library() -> None:
    problem = reference.problem(square(1, 4, 3, 2, 1, 1), False, 0, 8, 0, extremes=False)
    size = problem.conv.outputs
    buffers: list[NDArray[Any]] = [
        np.empty(size - 1, np.int32),
        np.empty(size, np.int64),
        np.empty(2 * size, np.int32)[::2],
    ]
    for acc in buffers:
        with pytest.raises(ValueError, match="contiguous int32 are due"):
            training.conv_forward(problem.conv, problem.stored_codes, problem.weights, 1, acc)
