"""Magnitude planes, their density, and pruning the top one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.model.grid import GridError, code_range, dequantize
from fedmpq.model.pruning import magnitudes, msb_density, prune_msb

Codes = NDArray[np.uint8]


@st.composite
def codes_and_bits(draw: st.DrawFn, least: int = 1) -> tuple[Codes, int]:
    """Codes crowded around the middle, more or less, so that planes are pruned now and then."""
    bits = draw(st.integers(least, 8))
    shape = draw(st.sampled_from([(1,), (7,), (3, 5), (2, 3, 3, 1), (16, 17)]))
    spread = draw(st.sampled_from([0.01, 0.05, 0.15, 0.4, 3.0])) * 2**bits
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    drawn = np.rint(random.normal((2**bits - 1) / 2, spread, shape))
    low, high = code_range(bits)
    return np.clip(drawn, low, high).astype(np.uint8), bits


def naive_density(codes: Codes, bits: int) -> float:
    """The share of codes whose two top bits are equal."""
    equal = [(code >> (bits - 1) & 1) == (code >> (bits - 2) & 1) for code in codes.reshape(-1).tolist()]
    return sum(equal) / len(equal)


def naive_pruning(codes: Codes, bits: int, density: float) -> tuple[list[int], int]:
    """docs/algorithm.md, MSB pruning, word by word."""
    flat = codes.reshape(-1).tolist()
    while bits > 2:
        equal = sum((code >> (bits - 1)) == (code >> (bits - 2) & 1) for code in flat)
        if equal / len(flat) > density:
            break
        flat = [min(max(code - 2 ** (bits - 2), 0), 2 ** (bits - 1) - 1) for code in flat]
        bits -= 1
    return flat, bits


@given(codes_and_bits())
def test_the_magnitude_is_the_distance_from_the_middle(drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    half = 2 ** (bits - 1)
    expected = [code - half if code >= half else half - 1 - code for code in codes.reshape(-1).tolist()]
    assert magnitudes(codes, bits).reshape(-1).tolist() == expected
    assert magnitudes(codes, bits).max() < half


@pytest.mark.parametrize("bits", range(2, 9))
def test_magnitude_is_the_size_of_the_weight(bits: int) -> None:
    codes = np.arange(2**bits, dtype=np.uint8) if bits < 8 else np.arange(1, 256, dtype=np.uint8)
    size = np.abs(dequantize(codes, np.array(1, np.float32), bits))
    if bits < 8:
        np.testing.assert_array_equal(magnitudes(codes, bits) + 0.5, size)
    else:
        assert (np.abs(magnitudes(codes, bits) + 0.5 - size) == 0.5).all()


@given(codes_and_bits(least=2))
def test_density_equals_a_naive_count(drawn: tuple[Codes, int]) -> None:
    codes, bits = drawn
    assert msb_density(codes, bits) == naive_density(codes, bits)
    top = magnitudes(codes, bits) >> (bits - 2)
    assert msb_density(codes, bits) == np.count_nonzero(top) / codes.size


@given(codes_and_bits(), st.sampled_from([0.0, 0.01, 0.03, 0.2, 0.6, 1.0]))
def test_pruning_is_the_papers_loop(drawn: tuple[Codes, int], density: float) -> None:
    codes, bits = drawn
    before = codes.copy()
    pruned, left = prune_msb(codes, bits, density)
    np.testing.assert_array_equal(codes, before)
    assert pruned.dtype == np.uint8
    assert pruned.shape == codes.shape
    assert (pruned.reshape(-1).tolist(), left) == naive_pruning(codes, bits, density)
    assert left <= 2 or msb_density(pruned, left) > density


# Powers of two, so that no value is rounded.
@given(codes_and_bits(), st.sampled_from([0.0, 0.03, 0.3, 1.0]), st.sampled_from([2.0**-20, 0.25, 4.0]))
def test_pruning_keeps_every_value_that_still_fits(
    drawn: tuple[Codes, int], density: float, step: float
) -> None:
    codes, bits = drawn
    pruned, left = prune_msb(codes, bits, density)
    one = np.array(step, np.float32)
    before, after = dequantize(codes, one, bits), dequantize(pruned, one, left)
    if left == bits:
        np.testing.assert_array_equal(after, before)
        return
    moved = before + np.float32(step / 2) if bits == 8 else before
    ends = dequantize(np.array(code_range(left), np.uint8), one, left)
    fits = (moved >= ends[0]) & (moved <= ends[1])
    np.testing.assert_array_equal(after[fits], moved[fits])
    assert (np.abs(after - before)[fits] <= (step / 2 if bits == 8 else 0)).all()
    np.testing.assert_array_equal(after[moved > ends[1]], ends[1])
    np.testing.assert_array_equal(after[moved < ends[0]], ends[0])


def test_density_zero_drops_empty_planes_only() -> None:
    """7 bits whose magnitudes need 3: pruned to the sign and those 3, all values kept."""
    codes = np.arange(64 - 8, 64 + 8, dtype=np.uint8)
    pruned, left = prune_msb(codes, 7, 0.0)
    assert left == 4
    assert pruned.tolist() == list(range(16))


def test_the_density_is_inclusive() -> None:
    codes = np.array([0, 2, 3, 4, 5, 3, 4, 3], np.uint8)
    assert msb_density(codes, 3) == 1 / 8
    assert prune_msb(codes, 3, 1 / 8)[1] == 2
    assert prune_msb(codes, 3, 1 / 8 - 1e-9)[1] == 3


@pytest.mark.parametrize("bits", [1, 2])
def test_two_bits_are_the_least(bits: int) -> None:
    codes = np.array([0, 1, 1], np.uint8)
    pruned, left = prune_msb(codes, bits, 1.0)
    assert left == bits
    np.testing.assert_array_equal(pruned, codes)


def test_a_middle_that_is_all_zeros_prunes_to_two_bits() -> None:
    """At 8 bits zero is code 128; at 2 bits nothing is zero, the nearest above is half a step."""
    codes = np.full((3, 3), 128, np.uint8)
    pruned, left = prune_msb(codes, 8, 0.0)
    assert left == 2
    assert (dequantize(pruned, np.array(1, np.float32), 2) == 0.5).all()


def test_a_view_is_read_in_order() -> None:
    base = np.random.default_rng(0).integers(24, 40, (8, 9), dtype=np.uint8)
    view = base.T[::2, ::-1]
    assert msb_density(view, 6) == msb_density(view.copy(), 6)
    np.testing.assert_array_equal(prune_msb(view, 6, 0.5)[0], prune_msb(view.copy(), 6, 0.5)[0])


def test_what_has_no_magnitude_plane_is_refused() -> None:
    with pytest.raises(ValueError, match="1-bit code has no magnitude plane"):
        msb_density(np.zeros(3, np.uint8), 1)
    with pytest.raises(GridError, match="bit-width 0"):
        magnitudes(np.zeros(3, np.uint8), 0)
    with pytest.raises(ValueError, match="code 9 at index 1 is too large"):
        msb_density(np.array([1, 9], np.uint8), 3)


def test_no_codes_are_no_density() -> None:
    assert msb_density(np.zeros((0, 3), np.uint8), 4) == 0
