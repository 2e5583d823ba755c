"""Float32 arithmetic by way of doubles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.training.binding import single

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(left=floats, right=floats)
def test_products_and_quotients_are_those_of_float32(left: float, right: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        assert single(left * right) == np.float32(left) * np.float32(right)
        if right != 0:
            assert single(left / right) == np.float32(left) / np.float32(right)
