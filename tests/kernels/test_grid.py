"""Errors on grids, against NumPy's passes over whole arrays: the same to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.kernels import force_isa, grid_errors, isa, supported_isas
from fedmpq.kernels.call import KernelError


def reference(rows: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    high = np.float32(2**bits - 1)
    low, zero = (np.float32(1), np.float32(128)) if bits == 8 else (np.float32(0), high / np.float32(2))
    columns = []
    for step in steps.T:
        codes = np.clip(np.rint(rows / step[:, None] + zero), low, high)
        difference = rows - (codes - zero) * step[:, None]
        columns.append(np.square(difference).sum(axis=1))
    return np.stack(columns, axis=1)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.one_of(st.integers(1, 40), st.integers(100, 1100), st.sampled_from((4096, 9217, 36_864))),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(supported_isas()),
    st.integers(0, 2**32 - 1),
)
def test_errors_are_numpys_to_the_bit(
    count: int, length: int, candidates: int, bits: int, name: str, seed: int
) -> None:
    draws = np.random.default_rng(seed)
    rows = draws.normal(0, 10.0 ** draws.integers(-6, 6), (count, length)).astype(np.float32)
    steps = (np.abs(rows).max() * 10.0 ** draws.uniform(-3, 1, (count, candidates))).astype(np.float32)
    # Ties between two codes, and weights far outside the grid.
    rows[:, :: max(1, length // 7)] = (steps[:, :1] * draws.integers(-9, 9)) / np.float32(2)
    rows[0, 0] = np.float32(1e15)
    before = isa()
    force_isa(name)
    try:
        found = grid_errors(rows, steps, bits)
    finally:
        force_isa(before)
    assert found.tobytes() == reference(rows, steps, bits).tobytes()


def test_what_does_not_fit_is_refused() -> None:
    rows, steps = np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match="must have two axes, the first the same"):
        grid_errors(rows, steps[:1], 4)
    with pytest.raises(KernelError):
        grid_errors(rows, steps, 9)
    assert grid_errors(rows[:0], steps[:0], 4).shape == (0, 1)
    assert grid_errors(rows[:, :0], steps, 4).tolist() == [[0.0], [0.0]]
