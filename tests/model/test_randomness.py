"""Draws are a function of their key alone."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fedmpq import kernels
from fedmpq.model.randomness import SERVER, Draws, Purpose


def test_a_draw_is_the_philox_stream_of_its_key() -> None:
    numbers = Draws(7, 3, 11).uniform(10, Purpose.LASSO, layer=5, step=9)
    blocks = [kernels.philox_block((j, 9, 11, 5 * 16 + 1), (7, 3)) for j in range(3)]
    expected = (np.concatenate(blocks)[:10] >> 8).astype(np.float64) * 2.0**-24
    np.testing.assert_array_equal(numbers, expected.astype(np.float32))


def test_no_two_keys_share_numbers() -> None:
    keys = [*np.eye(5, dtype=int).tolist(), [0, 0, 0, 0, 0], [0, SERVER, 0, 0, 0]]
    streams = [
        Draws(seed, client, number).uniform(64, purpose, layer=layer, step=step).tobytes()
        for seed, client, number, layer, step in keys
        for purpose in Purpose
    ]
    assert all(one != other for one, other in combinations(streams, 2))


def test_numbers_are_uniform_and_below_one() -> None:
    numbers = Draws(1, 2, 3).uniform(100_000, Purpose.UPDATE)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / len(numbers)
    assert np.abs(shares - 0.1).max() < 0.005


def test_the_start_of_a_long_draw_is_the_short_one() -> None:
    draws = Draws(1, 2, 3)
    short, long = draws.uniform(5, Purpose.ORDER), draws.uniform(50, Purpose.ORDER)
    np.testing.assert_array_equal(short, long[:5])
    assert draws.uniform(0, Purpose.ORDER).shape == (0,)


def test_a_seed_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is 4294967296"):
        Draws(2**32, 0, 0).uniform(1, Purpose.UPDATE)
