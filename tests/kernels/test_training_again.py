"""Accumulators that are computed again for each use give what stored ones give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Conv, Normalize, Rescale, StoredCodes
from tests.kernels import training_reference as reference
from tests.kernels.training_reference import Problem, problems

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = NDArray[Any]

SHAPES = [
    Conv.over(3, (16, 32, 32), out_channels=96),
    Conv.over(2, (3, 33, 20), out_channels=32, kernel=(3, 3), stride=(2, 2), padding=(1, 1)),
    Conv.over(2, (40, 15, 14), out_channels=40, kernel=(3, 3), padding=(1, 1), groups=40),
    Conv.over(12, (24, 2, 2), out_channels=17),
    Conv.over(2, (5, 3, 200), out_channels=70),
]


def results(problem: Problem, threads: int, stored: bool) -> list[Array]:
    """Sums of both passes, codes, and errors with their greatest: of accumulators that are stored, or not."""
    conv, rng = problem.conv, np.random.default_rng(3)
    channels, count = conv.out_channels, conv.images * conv.outputs
    acc = np.empty(count, np.int32) if stored else None
    error = reference.halved(rng.normal(size=count).astype(np.float32))
    scale = (rng.choice([-1, 1], channels) * rng.uniform(0.001, 0.1, channels)).astype(np.float32)
    rescale = Rescale(scale, rng.uniform(0, 15, channels).astype(np.float32), 0, 15)
    norm, bias, gain, mean_g, mean_gx = (rng.normal(size=channels).astype(np.float32) for _ in range(5))
    normalize, extent = Normalize(norm, bias), FedmpqExtent(conv.images, conv.pixels, channels)
    product = conv, problem.stored_codes, problem.weights
    sums, more = np.empty((2, channels)), np.empty((4, channels))
    pairs = conv.out_width * channels % 2 == 0
    codes = np.full(StoredCodes.nbytes(conv.images, conv.outputs, pairs), 0xEE, np.uint8)
    turned, greatest = np.empty_like(error), np.full(conv.images, np.nan, np.float32)
    bound.conv_forward(*product, threads, acc, sums)()
    bound.conv_backward_sums(*product, None, error, rescale, normalize, threads, acc, more)()
    rest = rescale, normalize, gain, mean_g, mean_gx, threads, turned, greatest
    if acc is None:
        bound.conv_requantize(*product, rescale, pairs, threads, codes)()
        bound.conv_backward_error(conv, problem.stored_codes, problem.weights, error, *rest)()
    else:
        bound.requantize(acc, extent, rescale, pairs, threads, codes)()
        bound.backward_error(acc, error, extent, *rest)()
    return [sums, more, codes, turned, greatest]


def assert_same(problem: Problem, threads: int) -> None:
    for again, stored in zip(results(problem, threads, False), results(problem, 1, True), strict=True):
        np.testing.assert_array_equal(again, stored)


@per_isa
@given(problems(), st.integers(1, 3))
def test_small_layers_come_out_the_same(isa: str, problem: Problem, threads: int) -> None:
    assume(problem.conv.groups in (1, problem.conv.channels))
    assume(problem.conv.groups == 1 or problem.conv.channels == problem.conv.out_channels)
    assert_same(problem, threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("conv", SHAPES, ids=lambda c: f"{c.height}-{c.channels}-{c.out_channels}")
def test_layers_of_several_bands_come_out_the_same(isa: str, conv: Conv, pairs: bool, threads: int) -> None:
    assert_same(reference.problem(conv, pairs, 0 if pairs else 120, 6, 5, extremes=False), threads)


def requantize(conv: Conv, pairs: bool) -> None:
    ones = np.ones(conv.out_channels, np.float32)
    codes = StoredCodes(np.zeros(conv.images * conv.inputs, np.uint8), False, 0)
    out = np.zeros(conv.images * conv.outputs, np.uint8)
    weights = np.zeros(conv.weights, np.int8)
    bound.conv_requantize(conv, codes, weights, Rescale(ones, ones, 0, 15), pairs, 1, out)()


def test_pairs_that_rows_would_share_are_refused() -> None:
    conv = Conv.over(2, (4, 3, 5), out_channels=7)
    requantize(conv, False)
    requantize(Conv.over(2, (4, 1, 5), out_channels=7), True)
    with pytest.raises(KernelError, match="outside what it takes"):
        requantize(conv, True)


def test_groups_need_their_accumulators() -> None:
    conv = Conv.over(2, (4, 3, 4), out_channels=8, groups=2)
    codes, weights = StoredCodes(np.zeros(96, np.uint8), False, 0), np.zeros(conv.weights, np.int8)
    bound.conv_forward(conv, codes, weights, 1, np.zeros(2 * conv.outputs, np.int32), None)()
    with pytest.raises(KernelError, match="outside what it takes"):
        bound.conv_forward(conv, codes, weights, 1, None, np.zeros(16))()
    with pytest.raises(KernelError, match="outside what it takes"):
        requantize(conv, False)
