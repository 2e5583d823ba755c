"""Momentum buffers against a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq.training.momentum import BLOCK, BlockMomentum, FloatMomentum, NoMomentum, make_momentum

SIZES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1000]


def gradients(size: int, count: int = 30) -> list[NDArray[np.float32]]:
    """Normal, with a size that differs from weight to weight by up to a thousand."""
    random = np.random.default_rng(size)
    scales = 10.0 ** random.uniform(-3, 0, size)
    return [(random.normal(size=size) * scales).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_without_a_buffer_the_gradient_passes(size: int) -> None:
    momentum = make_momentum(size, 0.9, 0)
    assert isinstance(momentum, NoMomentum)
    for gradient in gradients(size, 3):
        assert np.array_equal(momentum.push(gradient), gradient)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_factor_of_zero_needs_no_buffer(bits: int) -> None:
    assert isinstance(make_momentum(5, 0.0, bits), NoMomentum)


@pytest.mark.parametrize("size", SIZES)
def test_float_momentum_follows_the_reference(size: int) -> None:
    momentum = make_momentum(size, 0.9, 32)
    assert isinstance(momentum, FloatMomentum)
    exact = np.zeros(size)
    largest = np.zeros(size)
    for gradient in gradients(size):
        exact = 0.9 * exact + gradient
        largest = np.maximum(largest, np.abs(exact))
        got = momentum.push(gradient)
        assert got.dtype == np.float32
        assert (np.abs(got - exact) <= 1e-5 * largest).all()


@pytest.mark.parametrize("size", SIZES)
def test_block_momentum_stays_within_its_rounding(size: int) -> None:
    """Each push rounds to steps of `max|block|/127`: error <= mu * (error before + half a step)."""
    momentum = make_momentum(size, 0.9, 8)
    assert isinstance(momentum, BlockMomentum)
    exact, bound = np.zeros(size), np.zeros(size)
    block_of = np.arange(size) // BLOCK
    for gradient in gradients(size):
        exact = 0.9 * exact + gradient
        got = momentum.push(gradient)
        assert got.shape == (size,)
        assert got.dtype == np.float32
        assert (np.abs(got - exact) <= bound + 1e-5 * np.abs(exact).max()).all()
        steps = np.array([np.abs(got[block_of == b]).max() / 127 for b in range(block_of[-1] + 1)])
        bound = 0.9 * (bound + steps[block_of] / 2)


def test_blocks_do_not_disturb_each_other() -> None:
    size = 2 * BLOCK + 1
    momentum = make_momentum(size, 0.5, 8)
    gradient = np.full(size, 1e-6, np.float32)
    gradient[:BLOCK] = 1e6
    momentum.push(gradient)
    got = momentum.push(np.zeros(size, np.float32))
    np.testing.assert_allclose(got, gradient / 2, rtol=1e-6)


def test_zeros_stay_zero() -> None:
    for bits in (0, 8, 32):
        momentum = make_momentum(130, 0.9, bits)
        for _ in range(2):
            assert not momentum.push(np.zeros(130, np.float32)).any()


def test_denormal_gradients_keep_their_sign() -> None:
    """190 * 2^-149 over 127 rounds to 2^-149, so the quotient, 190, does not fit the byte."""
    momentum = make_momentum(2, 0.9, 8)
    gradient = np.array([190 * 2.0**-149, -190 * 2.0**-149], np.float32)
    momentum.push(gradient)
    assert np.array_equal(np.sign(momentum.push(np.zeros(2, np.float32))), [1, -1])


def test_pushing_leaves_the_gradient_alone() -> None:
    for bits in (0, 8, 32):
        momentum = make_momentum(3, 0.9, bits)
        gradient = np.array([1, -2, 3], np.float32)
        momentum.push(gradient)
        momentum.push(gradient)
        assert gradient.tolist() == [1, -2, 3]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_kept_per_weight(size: int) -> None:
    blocks = -(-size // BLOCK)
    for bits, expected in ((0, 0), (8, blocks * (BLOCK + 4)), (32, 4 * size)):
        momentum = make_momentum(size, 0.9, bits)
        momentum.push(np.ones(size, np.float32))
        arrays = [value for value in vars(momentum).values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in arrays) == expected
