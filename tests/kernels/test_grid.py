"""The step with the least error, and errors, against NumPy over whole arrays: the same to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import force_isa, grid_noise, isa, least_error_grids, supported_isas
from fedmpq.kernels.call import KernelError

Rows = NDArray[np.float32]
LEAST = np.float32(2.0**-30)
SHARES = np.linspace(0, 1, 16, dtype=np.float32)


def centred(rows: Rows, steps: Rows, bits: int) -> Rows:
    high = np.float32(2**bits - 1)
    low, zero = (np.float32(1), np.float32(128)) if bits == 8 else (np.float32(0), high / np.float32(2))
    codes: Rows = np.clip(np.rint(rows / steps[:, None] + zero), low, high)
    return codes - zero


def errors(rows: Rows, steps: Rows, bits: int) -> Rows:
    difference = rows - centred(rows, steps, bits) * steps[:, None]
    return np.asarray(np.square(difference).sum(axis=1), np.float32)


def power(base: Rows, exponent: Rows) -> Rows:
    return np.asarray(base.astype(np.float64) ** exponent.astype(np.float64), np.float32)


def searched(rows: Rows, spanning: Rows, bits: int) -> Rows:
    deviation = np.sqrt(np.mean(np.square(rows), axis=1))
    low = np.clip(deviation * np.float32(0.5 / (2**bits - 1)), LEAST, spanning)
    high = steps = spanning
    for _ in range(3):
        candidates = low[:, None] * power((high / low)[:, None], SHARES[None])
        table = np.stack([errors(rows, column, bits) for column in candidates.T], axis=1)
        steps = candidates[np.arange(len(rows)), table.argmin(axis=1)]
        gap = power(high / low, SHARES[1:2])
        low, high = np.maximum(steps / gap, LEAST), np.minimum(steps * gap, spanning)
    return steps


def reference(rows: Rows, samples: Rows, bits: int) -> Rows:
    spanning = np.maximum(np.float32(2.0 / (2**bits - 1)) * np.abs(rows).max(axis=1), LEAST)
    steps = searched(samples, spanning, bits)
    for _ in range(3):
        codes = centred(rows, steps, bits)
        energy = np.square(codes).sum(axis=1)
        fitted = (rows * codes).sum(axis=1) / np.maximum(energy, np.float32(1e-12))
        steps = np.where(energy > 0, np.maximum(fitted, LEAST), steps)
    smaller = errors(rows, steps, bits) < errors(rows, spanning, bits)
    return np.asarray(np.where(smaller, steps, spanning), np.float32)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.one_of(st.integers(1, 40), st.integers(100, 1100), st.sampled_from((4096, 9217))),
    st.integers(1, 4000),
    st.integers(1, 8),
    st.sampled_from(supported_isas()),
    st.integers(0, 2**32 - 1),
)
def test_steps_are_numpys_to_the_bit(
    count: int, length: int, searched: int, bits: int, name: str, seed: int
) -> None:
    draws = np.random.default_rng(seed)
    rows = draws.normal(0, 10.0 ** draws.integers(-6, 6), (count, length)).astype(np.float32)
    # Ties between two codes, equal weights, and one far outside the others.
    rows[:, :: max(1, length // 7)] = np.float32(draws.integers(-9, 9) / 2)
    if seed % 3 == 0:
        rows[0, 0] = np.float32(1e15)
    first = max(1, length // searched)
    stride = next(stride for stride in range(first, 2 * length + first) if math.gcd(stride, length) == 1)
    samples = np.ascontiguousarray(rows[:, ::stride])
    before = isa()
    force_isa(name)
    try:
        ((steps, noise),) = least_error_grids([rows], [(0, bits)], searched, threads=1)
        alone = grid_noise(rows, steps, bits)
    finally:
        force_isa(before)
    assert steps.tobytes() == reference(rows, samples, bits).tobytes()
    difference = rows - centred(rows, steps, bits) * steps[:, None]
    assert noise.tobytes() == np.square(difference, dtype=np.float64).sum(axis=1).tobytes()
    assert alone.tobytes() == noise.tobytes()


def test_many_grids_at_once_are_those_of_each_alone() -> None:
    draws = np.random.default_rng(4)
    layers = [draws.normal(size=shape).astype(np.float32) for shape in ((1, 700), (5, 9), (3, 128), (1, 1))]
    wanted = [(layer, bits) for layer in (2, 0, 3, 1) for bits in (8, 2, 5)]
    for threads in (1, 3):
        found = least_error_grids(layers, wanted, 100, threads)
        for (layer, bits), (steps, noise) in zip(wanted, found, strict=True):
            ((alone, its_noise),) = least_error_grids([layers[layer]], [(0, bits)], 100, 1)
            assert steps.tobytes() == alone.tobytes()
            assert noise.tobytes() == its_noise.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    rows = np.ones((2, 3), np.float32)
    for wanted, searched in (((0, 9), 4), ((0, 0), 4), ((0, 4), 0)):
        with pytest.raises(KernelError):
            least_error_grids([rows], [wanted], searched, 1)
    with pytest.raises(KernelError):
        least_error_grids([rows[:, :0]], [(0, 4)], 4, 1)
    with pytest.raises(ValueError, match="a step each"):
        grid_noise(rows, np.ones(3, np.float32), 4)
    with pytest.raises(KernelError):
        grid_noise(rows, np.ones(2, np.float32), 0)
    assert grid_noise(rows[:, :0], np.ones(2, np.float32), 4).tolist() == [0.0, 0.0]
    ((steps, noise),) = least_error_grids([np.zeros_like(rows)], [(0, 4)], 4, 1)
    assert steps.tolist() == [LEAST, LEAST]
    assert noise.max() < 1e-17
