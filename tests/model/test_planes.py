"""Codes to bit-planes and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.model import planes


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[NDArray[np.uint8], int]:
    """Codes of any width and shape, one weight and odd numbers of them included."""
    bits = draw(st.integers(1, 8))
    shape = draw(st.one_of(st.tuples(st.integers(0, 600)), st.tuples(*[st.integers(1, 5)] * 4)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random.integers(0, 2**bits, shape, dtype=np.uint8), bits


@given(codes_and_bits())
def test_planes_keep_every_code(drawn: tuple[NDArray[np.uint8], int]) -> None:
    codes, bits = drawn
    packed = planes.pack(codes, bits)
    assert packed.shape == (bits, -(-codes.size // 8))
    assert packed.nbytes == planes.nbytes(bits, codes.size)
    again = planes.unpack(packed, codes.shape)
    assert again.dtype == np.uint8
    assert again.shape == codes.shape
    np.testing.assert_array_equal(again, codes)


def test_the_layout_is_plane_by_plane_least_significant_first() -> None:
    codes = np.array([[5, 2, 7], [0, 1, 6], [3, 4, 5]], np.uint8)
    packed = planes.pack(codes, 3)
    bits = [[code >> plane & 1 for code in codes.reshape(-1).tolist()] for plane in range(3)]
    expected = [
        [sum(bit << place for place, bit in enumerate(row[start : start + 8])) for start in (0, 8)]
        for row in bits
    ]
    assert packed.tolist() == expected


def test_codes_that_lie_scattered_in_memory_are_read_in_order() -> None:
    base = np.random.default_rng(0).integers(0, 8, (6, 5, 4), dtype=np.uint8)
    view = base.transpose(2, 0, 1)[:, ::-2]
    packed = planes.pack(view, 3)
    np.testing.assert_array_equal(packed, planes.pack(view.copy(), 3))
    np.testing.assert_array_equal(planes.unpack(packed, view.shape), view)


def test_a_code_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="code 4 at index 2 is too large"):
        planes.pack(np.array([[0, 3], [4, 1]], np.uint8), 2)


def test_planes_of_another_layer_are_refused() -> None:
    packed = planes.pack(np.zeros(17, np.uint8), 2)
    with pytest.raises(ValueError, match="planes of 16 weights have 2 bytes each, not 3"):
        planes.unpack(packed, (4, 4))
    with pytest.raises(ValueError, match="planes of 25 weights"):
        planes.unpack(packed, (25,))


def test_padding_must_be_zero() -> None:
    packed = planes.pack(np.zeros(9, np.uint8), 2)
    packed[1, 1] |= 0x80
    with pytest.raises(ValueError, match="plane 1 has padding bits set"):
        planes.unpack(packed, (3, 3))
