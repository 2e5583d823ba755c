"""Scalar products of whole numbers, against Python's own whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.kernels import force_isa, isa, supported_isas
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.changes import add_whole_products


@given(
    st.integers(0, 11),
    st.sampled_from((0, 1, 2, 7, 8, 9, 31, 511, 512, 513, 1040)),
    st.sampled_from((0, 1, 100, 1 << 21, 1 << 26)),
    st.sampled_from(supported_isas()),
    st.integers(0, 2**32 - 1),
)
def test_products_are_exact(rows: int, columns: int, most: int, name: str, seed: int) -> None:
    """Also of numbers of which two together are more than a double holds."""
    draws = np.random.default_rng(seed)
    numbers = draws.integers(-most, most + 1, (rows, columns))
    upper, lower = (draws.integers(-5, 6, (rows, rows)) for _ in range(2))
    before, after = [upper.copy(), lower.copy()], [upper, lower]
    was = isa()
    force_isa(name)
    try:
        add_whole_products(numbers.astype(np.float64), upper, lower)
    finally:
        force_isa(was)
    whole = [[int(each) for each in row] for row in numbers]
    for i in range(rows):
        for j in range(rows):
            found = sum(
                (int(new[i, j]) - int(old[i, j])) << shift
                for old, new, shift in zip(before, after, (26, 0), strict=True)
            )
            assert found == (sum(a * b for a, b in zip(whole[i], whole[j], strict=True)) if j <= i else 0)


@pytest.mark.parametrize("number", [0.5, -0.25, 2.0**26 + 1, np.nan, np.inf])
def test_what_is_no_whole_number_is_refused(number: float) -> None:
    numbers, room = np.ones((3, 5)), np.zeros((3, 3), np.int64)
    numbers[2, 4] = number
    with pytest.raises(KernelError, match="whole_products"):
        add_whole_products(numbers, room, room.copy())
    assert not room.any()
