"""The integer updates against one-weight-at-a-time references and against their expectations."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.model.pruning import magnitudes
from fedmpq.training.update import carried_update, lasso_pull, lasso_update, paper_update

ALL_BITS = range(1, 9)
BELOW_ONE = np.float32(1 - 2**-24)
ONE = np.ones((), np.float32)
# Smaller powers of two move nothing: 2^-64 * (4^8 - 1)/3 is under 2^-49, and uniforms are multiples of 2^-24.
LEAST = -63

bit_widths = st.integers(1, 8)
unit = st.floats(0, float(BELOW_ONE), width=32)


def lowest(bits: int) -> int:
    return 1 if bits == 8 else 0


def clipped(code: int, bits: int) -> int:
    return min(max(code, lowest(bits)), (1 << bits) - 1)


def all_codes(bits: int) -> NDArray[np.uint8]:
    return np.arange(lowest(bits), 2**bits, dtype=np.uint8)


def evenly(count: int) -> NDArray[np.float32]:
    """The middles of `count` equal parts of [0, 1)."""
    return ((np.arange(count) + 0.5) / count).astype(np.float32)


@cache
def whole_and_chance(k: int, bits: int) -> tuple[int, Fraction]:
    exponents = [k + 2 * i - 1 for i in range(1, bits + 1)]
    if exponents[-1] > bits:
        return 2**bits - 1, Fraction(0)
    whole = sum((Fraction(2) ** (q - 1) for q in exponents if 1 <= q <= bits), Fraction(0))
    assert whole.denominator == 1
    return int(whole), sum((Fraction(2) ** (q - 1) for q in exponents if q <= 0), Fraction(0))


def slow_paper(code: int, direction: np.float32, bits: int, u: np.float32) -> int:
    """Section 3 of the algorithm for one weight, with `eta * step = 1`."""
    size = abs(float(direction))
    if size == 0:
        return code
    # A float32 is never a power of two times sqrt(2), so there is no tie.
    whole, chance = whole_and_chance(round(math.log2(size)), bits) if size < math.inf else (2**bits - 1, 0)
    steps = whole + (Fraction(float(u)) < chance)
    return clipped(code - steps if direction > 0 else code + steps, bits)


def every_exponent() -> NDArray[np.float32]:
    """Floats of all exponents, denormal to infinite, on both sides of each rounding of log2; signed."""
    half = np.float32(math.sqrt(0.5))
    mantissas = np.array(
        [0.5, np.nextafter(half, np.float32(0)), half, np.nextafter(half, np.float32(1)), BELOW_ONE],
        np.float32,
    )
    sizes = np.ldexp(mantissas[:, None], np.arange(LEAST + 1, 129)[None, :]).reshape(-1)
    tiny = np.ldexp(np.float32(1), np.arange(-149, -66))
    sizes = np.concatenate([sizes, tiny, np.array([0, np.inf, np.finfo(np.float32).max], np.float32)])
    return np.concatenate([sizes, -sizes]).astype(np.float32)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_paper_equals_the_slow_reference_at_every_exponent(bits: int) -> None:
    directions = every_exponent()
    codes = np.resize(all_codes(bits), len(directions))
    for u in (np.float32(2**-24), np.float32(0.3), np.float32(0.5), np.float32(0.6), BELOW_ONE):
        got = paper_update(codes, directions, ONE, bits, np.full(len(codes), u))
        expected = [slow_paper(int(c), d, bits, u) for c, d in zip(codes, directions, strict=True)]
        assert got.dtype == np.uint8
        assert got.tolist() == expected


@pytest.mark.parametrize("bits", ALL_BITS)
def test_paper_draws_below_its_chance_and_not_at_it(bits: int) -> None:
    middle = np.array([2 ** (bits - 1)], np.uint8)
    for k in range(-20, 2 - bits):
        chance = np.float32(whole_and_chance(k, bits)[1])
        direction = np.array([-(2.0**k)], np.float32)
        below = np.nextafter(chance, np.float32(-1))
        for u in (below, chance) if chance > 0 else (np.float32(0),):
            got = paper_update(middle, direction, ONE, bits, np.array([u]))
            assert got.tolist() == [slow_paper(int(middle[0]), direction[0], bits, u)]


@given(st.data(), bit_widths)
def test_paper_equals_the_slow_reference_on_random_weights(data: st.DataObject, bits: int) -> None:
    count = data.draw(st.integers(0, 9))
    floats = st.floats(allow_nan=False, width=32).filter(lambda x: not 0 < abs(x) < 2.0 ** (LEAST - 1))
    directions = data.draw(hnp.arrays(np.float32, count, elements=floats))
    uniforms = data.draw(hnp.arrays(np.float32, count, elements=unit))
    codes = data.draw(hnp.arrays(np.uint8, count, elements=st.integers(lowest(bits), 2**bits - 1)))
    before = codes.copy()
    got = paper_update(codes, directions, ONE, bits, uniforms)
    expected = [slow_paper(int(c), d, bits, u) for c, d, u in zip(codes, directions, uniforms, strict=True)]
    assert got.tolist() == expected
    assert np.array_equal(codes, before)


def test_paper_takes_one_rate_or_one_per_weight() -> None:
    codes, directions = np.full(4, 100, np.uint8), np.array([1, 2, -4, 0.5], np.float32)
    rates = np.array([2.0**-14, 2.0**-9, 2.0**-12, 1.0], np.float32)
    uniforms = np.full(4, 0.2, np.float32)
    got = paper_update(codes, directions, rates, 8, uniforms)
    for i in range(4):
        assert got[i] == slow_paper(100, directions[i] * rates[i], 8, uniforms[i])
        assert paper_update(codes, directions, rates[i], 8, uniforms)[i] == got[i]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_paper_moves_nothing_without_a_gradient_whatever_the_draw(bits: int) -> None:
    codes = all_codes(bits)
    for zero in (0.0, -0.0, 1e-45, -(2.0**LEAST) / 2):
        direction = np.full(len(codes), zero, np.float32)
        assert np.array_equal(
            paper_update(codes, direction, ONE, bits, np.zeros(len(codes), np.float32)), codes
        )


def test_paper_overflow_saturates() -> None:
    codes = np.array([7, 8], np.uint8)
    direction = np.array([3e38, -3e38], np.float32)
    got = paper_update(codes, direction, np.float32(1e10) * ONE, 4, np.zeros(2, np.float32))
    assert got.tolist() == [0, 15]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_paper_saturates_with_the_whole_range(bits: int) -> None:
    """From `q_b > b` on, the move is `2^b - 1`: across all codes, and no further."""
    direction = np.array([2.0 ** (2 - bits), -(2.0 ** (2 - bits))], np.float32)
    ends = np.array([2**bits - 1, lowest(bits)], np.uint8)
    got = paper_update(ends, direction, ONE, bits, np.full(2, BELOW_ONE))
    assert got.tolist() == ends[::-1].tolist()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_paper_chance_never_exceeds_two_thirds(bits: int) -> None:
    """A draw above 2/3 never adds a step: it moves as the greatest draw does."""
    directions = every_exponent()
    directions = directions[np.abs(directions) >= 2.0**LEAST]
    codes = np.full(len(directions), 2 ** (bits - 1), np.uint8)
    at_two_thirds = paper_update(codes, directions, ONE, bits, np.full(len(codes), 2 / 3, np.float32))
    at_the_end = paper_update(codes, directions, ONE, bits, np.full(len(codes), BELOW_ONE))
    assert np.array_equal(at_two_thirds, at_the_end)


@pytest.mark.parametrize(("bits", "k"), [(b, k) for b in ALL_BITS for k in (-19, -14, -b - 3, -b, 1 - b)])
def test_paper_moves_by_its_expectation(bits: int, k: int) -> None:
    """Mean move = sum_i 2^(q_i - 1) = 2^k (4^b - 1)/3, over many draws; up to the k that saturates next."""
    count = 1 << 18
    draws = kernels.philox_uniform(count, 1, 2, 3, bits, 5, 0)
    start = np.full(count, 2**bits - 1, np.uint8)
    moved = paper_update(start, np.full(count, 2.0**k, np.float32), ONE, bits, draws)
    mean = float(np.mean(start.astype(np.float64) - moved))
    expected = sum(Fraction(2) ** (k + 2 * i - 2) for i in range(1, bits + 1))
    assert expected == Fraction(2) ** k * (4**bits - 1) / 3
    fraction = float(expected) % 1
    assert mean == pytest.approx(
        float(expected), abs=5 * math.sqrt((fraction * (1 - fraction) + 1e-6) / count)
    )


@pytest.mark.parametrize("bits", range(2, 9))
def test_paper_is_sgd_with_its_rate_where_log2_is_exact(bits: int) -> None:
    """E[W' - W] = -eta * step^2 * (4^b - 1)/3 * d."""
    eta, step = 0.125, 2.0**-4
    count = 1 << 16
    for exponent in range(-8 - bits, 4 - bits):
        gradient = -(2.0**exponent)
        rate = np.float32(eta * step) * ONE
        start = np.full(count, lowest(bits), np.uint8)
        moved = paper_update(start, np.full(count, gradient, np.float32), rate, bits, evenly(count))
        mean_change = step * float(np.mean(moved.astype(np.float64) - start))
        expected = -eta * step**2 * (4**bits - 1) / 3 * gradient
        assert mean_change == pytest.approx(expected, abs=step / count)


fractions = st.integers(-128, 127)


def carried_by_hand(code: int, fraction: int, move: Fraction, u: Fraction, bits: int) -> tuple[int, int]:
    """One weight: its place on a line with a mark every 256th, the code being the nearest mark for codes."""
    place = Fraction(code) + Fraction(fraction, 256) - Fraction(math.floor(256 * move + u), 256)
    lowest_place = Fraction(lowest(bits)) - Fraction(1, 2)
    highest_place = Fraction(2**bits - 1) + Fraction(127, 256)
    place = min(max(place, lowest_place), highest_place)
    nearest = math.floor(place + Fraction(1, 2))
    return nearest, int(256 * (place - nearest))


@given(st.data(), bit_widths)
def test_carried_equals_the_slow_reference(data: st.DataObject, bits: int) -> None:
    """On a grid where float32 adds exactly."""
    parts = st.integers(-4096 * 300, 4096 * 300).map(lambda n: n / 4096)
    count = data.draw(st.integers(0, 9))
    moves = data.draw(hnp.arrays(np.float32, count, elements=parts))
    uniforms = data.draw(hnp.arrays(np.float32, count, elements=st.integers(0, 15).map(lambda n: n / 16)))
    codes = data.draw(hnp.arrays(np.uint8, count, elements=st.integers(lowest(bits), 2**bits - 1)))
    held = data.draw(hnp.arrays(np.int8, count, elements=fractions))
    got, got_fractions = carried_update(codes, held, moves, bits, uniforms)
    assert got.dtype == np.uint8
    assert got_fractions.dtype == np.int8
    for i in range(count):
        move, u = Fraction(float(moves[i])), Fraction(float(uniforms[i]))
        expected = carried_by_hand(int(codes[i]), int(held[i]), move, u, bits)
        assert (int(got[i]), int(got_fractions[i])) == expected


@given(st.data(), bit_widths)
def test_carried_stays_in_range_and_within_a_256th_of_its_move(data: st.DataObject, bits: int) -> None:
    move = np.array([data.draw(st.floats(allow_nan=False, width=32))], np.float32)
    code = np.array([data.draw(st.integers(lowest(bits), 2**bits - 1))], np.uint8)
    held = np.array([data.draw(fractions)], np.int8)
    uniform = np.array([data.draw(unit)], np.float32)
    (got,), (fraction,) = carried_update(code, held, move, bits, uniform)
    assert lowest(bits) <= got <= 2**bits - 1
    place = float(got) + float(fraction) / 256
    target = float(code[0]) + float(held[0]) / 256 - float(move[0])
    nearest = min(max(target, lowest(bits) - 0.5), 2**bits - 1 + 127 / 256)
    assert abs(place - nearest) <= 1 / 256 + abs(target) * 2**-22


@pytest.mark.parametrize("move", [0.0, 1e-5, -1e-5, 1e-3, 0.25, -0.75, 1.5, -2.375, 7.0])
def test_carried_is_unbiased(move: float) -> None:
    count = 1 << 16
    start, still = np.full(count, 100, np.uint8), np.zeros(count, np.int8)
    codes, held = carried_update(start, still, np.full(count, move, np.float32), 8, evenly(count))
    places = codes.astype(np.float64) + held / 256
    assert float(np.mean(100 - places)) == pytest.approx(move, abs=1 / count)


def test_small_moves_add_up_where_rounding_to_codes_would_walk_at_random() -> None:
    """1,000 moves of a hundredth of a code: ten codes for every weight, to within a few 256ths."""
    rng = np.random.default_rng(0)
    codes, held = np.full(500, 100, np.uint8), np.zeros(500, np.int8)
    for _ in range(1000):
        uniforms = rng.random(500, dtype=np.float32)
        codes, held = carried_update(codes, held, np.full(500, 0.01, np.float32), 8, uniforms)
    places = codes.astype(np.float64) + held / 256
    assert abs(places.mean() - 90) < 0.01
    assert places.std() < 0.1


def naive_pull(codes: NDArray[np.uint8], bits: int, strength: float) -> list[float]:
    """The table by loops over planes and weights; the magnitude counted from the middle of the range."""
    middle = 2 ** (bits - 1)
    sizes = [c - middle if c >= middle else middle - 1 - c for c in codes.tolist()]
    table = []
    for k in range(middle):
        pull = 0.0
        for plane in range(bits - 1):
            ones = sum(size >> plane & 1 for size in sizes)
            if k >> plane & 1 and ones:
                pull += strength * 2**plane / math.sqrt(ones)
        table.append(min(pull, k))
    return table


@given(st.data(), bit_widths, st.floats(0, 1e6))
def test_lasso_table_equals_the_loops(data: st.DataObject, bits: int, strength: float) -> None:
    codes = data.draw(hnp.arrays(np.uint8, st.integers(0, 20), elements=st.integers(0, 2**bits - 1)))
    got = lasso_pull(codes, bits, strength)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.array(naive_pull(codes, bits, strength), np.float32), rtol=1e-6)


def test_lasso_on_a_layer_worked_by_hand() -> None:
    """3 bits, magnitudes 3 1 0 0 2: the planes have two ones each, F(k) = k/sqrt(2)."""
    codes = np.array([7, 5, 4, 3, 1], np.uint8)
    np.testing.assert_allclose(lasso_pull(codes, 3, 1.0), np.array([0, 1, 2, 3]) / math.sqrt(2), rtol=1e-6)


def test_an_empty_plane_pulls_nothing() -> None:
    # Magnitudes 0 and 1 of 0..7: planes 1 and 2 are empty, so magnitude 6, binary 110, is not pulled at all.
    codes = np.array([8, 7, 9, 6], np.uint8)
    pull = lasso_pull(codes, 4, 0.5)
    assert pull[6] == 0
    assert pull[1] == pull[7] > 0


def test_one_bit_has_no_magnitude_to_pull() -> None:
    codes = np.array([0, 1, 1], np.uint8)
    pull = lasso_pull(codes, 1, 1.0)
    assert pull.tolist() == [0.0]
    assert np.array_equal(lasso_update(codes, pull, 1, np.full(3, BELOW_ONE)), codes)


@given(st.data(), st.integers(2, 8), st.sampled_from([1e-3, 0.3, 5.0, 1e4, 1e300]))
def test_lasso_moves_towards_zero_and_never_past_it(data: st.DataObject, bits: int, strength: float) -> None:
    codes = data.draw(
        hnp.arrays(np.uint8, st.integers(1, 20), elements=st.integers(lowest(bits), 2**bits - 1))
    )
    uniforms = data.draw(hnp.arrays(np.float32, codes.shape, elements=unit))
    pull = lasso_pull(codes, bits, strength)
    upper = codes >= 2 ** (bits - 1)
    moved = lasso_update(codes, pull, bits, uniforms)
    assert np.array_equal(moved >= 2 ** (bits - 1), upper)
    assert (magnitudes(moved, bits) <= magnitudes(codes, bits)).all()
    if strength > 1e3:
        assert not magnitudes(moved, bits).any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lasso_pulls_by_its_table_on_average(bits: int) -> None:
    count = 1 << 14
    pull = lasso_pull(all_codes(bits), bits, 0.7)
    for code in (lowest(bits), 2 ** (bits - 1) + 1, 2**bits - 1):
        start = np.full(count, code, np.uint8)
        size = int(magnitudes(start[:1], bits)[0])
        moved = magnitudes(lasso_update(start, pull, bits, evenly(count)), bits)
        assert size - float(moved.mean()) == pytest.approx(float(pull[size]), abs=2 / count)


def test_lasso_keeps_to_zero_where_float32_rounds_the_draw_up() -> None:
    """1 + (1 - 2^-24) is 2 in float32: the move must still stop at magnitude 0."""
    codes = np.array([9, 6], np.uint8)
    pull = np.arange(8, dtype=np.float32)
    assert lasso_update(codes, pull, 4, np.full(2, BELOW_ONE)).tolist() == [8, 7]
