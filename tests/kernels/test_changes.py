"""Whole-number changes and their weighted sums against the formulas in plain Python numbers."""

from __future__ import annotations

from ctypes import addressof
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.kernels.call import KernelError
from fedmpq.kernels.changes import MAX_CHANGE_STEP, Changes, code_changes, places
from fedmpq.kernels.library import library
from tests.kernels.slow_changes import CELL, slow_change

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@dataclass(frozen=True)
class Case:
    codes: NDArray[np.uint8]
    steps: NDArray[np.int32]
    places: NDArray[np.int32]
    bits: int
    within: bool

    @classmethod
    def drawn(cls, seed: int, boards: int, rows: int, row: int, bits: int, within: bool) -> Case:
        random = np.random.default_rng(seed)
        codes = random.integers(0, 2**bits, (boards, rows * row), dtype=np.uint8)
        # From the finest grid to one that leaves every cell, and places beyond both ends of the codes.
        steps = (2.0 ** random.uniform(0, 13.99, (boards, rows))).astype(np.int32)
        places = random.integers(-300 * CELL, (2**bits + 300) * CELL, rows * row).astype(np.int32)
        inside = random.integers(0, 2**bits * CELL, rows * row)
        return cls(
            codes,
            steps,
            np.where(random.random(rows * row) < 0.8, inside, places).astype(np.int32),
            bits,
            within,
        )

    @property
    def planes(self) -> NDArray[np.uint8]:
        return np.stack([kernels.pack_planes(each, self.bits) for each in self.codes])

    def changes(self) -> Changes:
        return Changes(self.planes, self.steps, self.places, self.within)

    def expected(self) -> list[list[int]]:
        row = self.places.size // self.steps.shape[1]
        return [
            [
                slow_change(int(code), int(steps[j // row]), int(self.places[j]), self.bits, self.within)
                for j, code in enumerate(codes)
            ]
            for codes, steps in zip(self.codes, self.steps, strict=True)
        ]


cases = st.builds(
    Case.drawn,
    seed=st.integers(0, 2**32 - 1),
    boards=st.integers(1, 4),
    rows=st.integers(1, 5),
    row=st.integers(1, 80),
    bits=st.integers(1, 8),
    within=st.booleans(),
)


@per_isa
@given(cases, st.data())
def test_changes_follow_the_formula_from_any_weight_on(isa: str, case: Case, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, case.places.size))
    count = data.draw(st.integers(0, case.places.size - first))
    expected = [each[first : first + count] for each in case.expected()]
    assert case.changes().of(first, count).tolist() == expected


@per_isa
@given(cases, st.lists(st.integers(0, 2**22), min_size=4, max_size=4))
def test_sums_are_those_of_whole_numbers(isa: str, case: Case, weights: list[int]) -> None:
    boards = len(case.codes)
    sums = np.arange(case.places.size, dtype=np.int64) - 2**61
    before = sums.tolist()
    case.changes().add_to(sums, np.array(weights[:boards], np.int32))
    columns = zip(*case.expected(), strict=True)
    added = [sum(w * c for w, c in zip(weights, column, strict=False)) for column in columns]
    assert sums.tolist() == [b + a for b, a in zip(before, added, strict=True)]


def narrow_case(
    seed: int, boards: int, row: int, bits: int, far: int, beyond: int
) -> tuple[Case, NDArray[np.int32]]:
    """Changes and weights of boards that an instruction set may sum in fewer bits, or just not.

    The widest move is up to `beyond` above 5.5 cells, weights up to 1 above 2^22, and one in `far` weights
    lies some cells beyond the ends.
    """
    random = np.random.default_rng(seed)
    widest = (22527 + beyond) // (256 if bits == 8 else 2**bits - 1)
    codes = random.integers(0, 2**bits, (boards, row), dtype=np.uint8)
    steps = np.minimum(random.choice([1, 80, widest - 1, widest, widest + 1], (boards, 1)), MAX_CHANGE_STEP)
    inside = random.integers(0, 2**bits * CELL, row)
    outside = random.integers(-8 * CELL, (2**bits + 8) * CELL, row)
    places = np.where(random.random(row) < 1 / far, outside, inside)
    weights = random.choice([0, 1, 1000, 2**11 - 1, 2**11, 2**21 + 12345, 2**22 - 1, 2**22], boards)
    if beyond % 2:
        weights[-1] = 2**22 + 1
    case = Case(codes, steps.astype(np.int32), places.astype(np.int32), bits, True)
    return case, weights.astype(np.int32)


@per_isa
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 17),
    st.integers(1, 200),
    st.integers(1, 8),
    st.sampled_from([2, 20, 1000]),
    st.sampled_from([-3000, 0, 0, 1, 3000]),
)
def test_sums_are_those_of_whole_numbers_where_fewer_bits_hold_them(
    isa: str, seed: int, boards: int, row: int, bits: int, far: int, beyond: int
) -> None:
    case, weights = narrow_case(seed, boards, row, bits, far, beyond)
    sums = np.arange(row, dtype=np.int64) - 2**61
    before = sums.tolist()
    case.changes().add_to(sums, weights)
    columns = zip(*case.expected(), strict=True)
    added = [sum(w * c for w, c in zip(weights.tolist(), column, strict=True)) for column in columns]
    assert sums.tolist() == [b + a for b, a in zip(before, added, strict=True)]


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_sums_of_the_widest_changes_that_fewer_bits_hold(isa: str, bits: int) -> None:
    """All boards move as far as they can, one way, with the greatest weight."""
    zero = 256 if bits == 8 else 2**bits - 1
    step = min(22527 // zero, MAX_CHANGE_STEP)
    far = 26623 - step * zero
    for code, place in (
        (0, 2**bits * CELL + far),
        (2**bits - 1, -far),
        (0, 0),
        (2**bits - 1, 2**bits * CELL),
    ):
        codes = np.full((8, 128), code, np.uint8)
        places = np.full(128, place, np.int32)
        case = Case(codes, np.full((8, 1), step, np.int32), places, bits, True)
        sums = np.zeros(128, np.int64)
        case.changes().add_to(sums, np.full(8, 2**22, np.int32))
        assert sums.tolist() == [8 * 2**22 * slow_change(code, step, place, bits, True)] * 128


@pytest.mark.parametrize("shape", [(1, 1023), (1, 1024), (1, 1025), (3, 1000), (5, 1031)])
@pytest.mark.parametrize("within", [False, True])
def test_lengths_around_tiles(isa: str, shape: tuple[int, int], within: bool) -> None:
    case = Case.drawn(3, 2, *shape, bits=3, within=within)
    expected = np.array(case.expected())
    np.testing.assert_array_equal(case.changes().of(0, case.places.size), expected)
    np.testing.assert_array_equal(case.changes().of(13, case.places.size - 20), expected[:, 13:-7])
    sums = np.zeros(case.places.size, np.int64)
    case.changes().add_to(sums, np.array([5, 7], np.int32))
    np.testing.assert_array_equal(sums, 5 * expected[0] + 7 * expected[1])


def test_no_boards_change_nothing(isa: str) -> None:
    changes = Changes(np.zeros((0, 3, 2), np.uint8), np.zeros((0, 1), np.int32), np.zeros(9, np.int32), True)
    sums = np.ones(9, np.int64)
    changes.add_to(sums, np.zeros(0, np.int32))
    assert sums.tolist() == [1] * 9
    assert changes.of(0, 9).shape == (0, 9)


def test_a_padding_bit_set_is_refused_and_the_sums_stay(isa: str) -> None:
    case = Case.drawn(0, 3, 1, 13, 4, True)
    planes, sums = case.planes, np.zeros(13, np.int64)
    planes[2, 1, -1] |= 0x80
    changes = Changes(planes, case.steps, case.places, True)
    for call in (lambda: changes.add_to(sums, np.ones(3, np.int32)), lambda: changes.of(0, 13)):
        with pytest.raises(ValueError, match="board 2 has padding bits set after weight 12"):
            call()
    assert not sums.any()


@pytest.mark.parametrize("step", [-1, 0, MAX_CHANGE_STEP + 1, 2**31 - 1])
def test_a_step_outside_its_range_is_refused(step: int) -> None:
    case = Case.drawn(0, 2, 3, 5, 4, True)
    case.steps[1, 2] = step
    with pytest.raises(KernelError, match=r"outside 1\.\.16383"):
        case.changes().of(0, 15)


def test_a_negative_weight_is_refused() -> None:
    case, sums = Case.drawn(0, 2, 3, 5, 4, True), np.zeros(15, np.int64)
    with pytest.raises(KernelError, match="a weight is negative"):
        case.changes().add_to(sums, np.array([1, -1], np.int32))
    assert not sums.any()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 16), (16, 0), (8, 8), (2**62, 2**62)])
def test_weights_that_are_not_there_are_refused(first: int, count: int) -> None:
    case = Case.drawn(0, 2, 3, 5, 4, True)
    out = np.zeros(64, np.int32)
    struct = case.changes()._struct
    assert library.fedmpq_changes(addressof(struct), first, count, out.ctypes.data) == -4
    assert not out.any()


def test_arrays_that_do_not_fit_one_another_are_refused() -> None:
    planes, places = np.zeros((2, 4, 2), np.uint8), np.zeros(15, np.int32)
    with pytest.raises(ValueError, match="one row of steps each"):
        Changes(planes, np.ones((3, 1), np.int32), places, True)
    with pytest.raises(ValueError, match="15 weights cannot be divided into 2 rows"):
        Changes(planes, np.ones((2, 2), np.int32), places, True)
    with pytest.raises(ValueError, match="have 1 bytes each, not 2"):
        Changes(planes, np.ones((2, 1), np.int32), places[:8], True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", 0),
        ("bits", 9),
        ("boards", -1),
        ("boards", 2**20 + 1),
        ("rows", 0),
        ("rows", 2**62),
        ("row", 0),
        ("row", 2**62),
        ("planes", None),
        ("steps", None),
        ("places", None),
    ],
)
def test_what_cannot_be_is_refused_by_the_library_itself(name: str, value: int | None) -> None:
    struct = Case.drawn(0, 2, 3, 5, 4, True).changes()._struct
    setattr(struct, name, value)
    weights, sums = np.ones(2, np.int32), np.zeros(64, np.int64)
    assert library.fedmpq_add_changes(addressof(struct), weights.ctypes.data, sums.ctypes.data) == -4
    assert library.fedmpq_changes(addressof(struct), 0, 15, sums.ctypes.data) == -4
    assert library.fedmpq_add_changes(None, weights.ctypes.data, sums.ctypes.data) == -4
    assert not sums.any()


def test_numbers_without_meaning_do_no_harm(isa: str) -> None:
    """Under the sanitizers: places and weights at the ends of their types overflow nothing but the sums."""
    case = Case.drawn(1, 2, 1, 100, 5, True)
    case.places[::2], case.places[1::2] = -(2**31), 2**31 - 1
    sums = np.full(100, 2**63 - 1, np.int64)
    for within in (False, True):
        changes = Changes(case.planes, case.steps, case.places, within)
        changes.add_to(sums, np.full(2, 2**31 - 1, np.int32))
        assert changes.of(0, 100).shape == (2, 100)


@per_isa
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 3), st.integers(1, 70))
def test_places_follow_the_formula(isa: str, seed: int, bits: int, rows: int, row: int) -> None:
    random = np.random.default_rng(seed)
    steps = random.uniform(0.01, 3, rows).astype(np.float32)
    weights = (random.standard_t(1.5, (rows, row)) * 2.0 ** random.integers(-4, 12)).astype(np.float32)
    low, high = (1, 255) if bits == 8 else (0, 2**bits - 1)
    codes = random.integers(low, high + 1, (rows, row)).astype(np.uint8)
    zero = 128 * CELL if bits == 8 else (2**bits - 1) * CELL // 2
    scaled = weights / steps[:, None] * np.float32(CELL)
    expected = []
    for number, code in zip(scaled.reshape(-1).tolist(), codes.reshape(-1).tolist(), strict=True):
        below = CELL * code - (CELL // 2 if code > low else 256 * CELL)
        above = CELL * code + (CELL // 2 - 1 if code < high else 256 * CELL)
        expected.append(min(max(round(min(max(number, -(2.0**21)), 2.0**21)) + zero, below), above))
    assert places(weights, codes, steps, bits).tolist() == expected


@pytest.mark.parametrize("step", [0.0, -1.0, np.nan, np.inf])
def test_places_need_steps_that_are_positive_and_finite(step: float) -> None:
    with pytest.raises(KernelError, match="fedmpq_places"):
        places(np.ones(6, np.float32), np.ones(6, np.uint8), np.array([1.0, step], np.float32), 4)


def test_places_of_what_does_not_fit_or_is_not_finite(isa: str) -> None:
    weights, steps = np.array([np.nan, np.inf, -np.inf], np.float32), np.ones(1, np.float32)
    found = places(weights, np.full(3, 2, np.uint8), steps, 3)
    assert ((found >= 2 * CELL - CELL // 2) & (found < 2 * CELL + CELL // 2)).all()
    for w, c, s in ((3, 2, 1), (3, 3, 2), (0, 0, 1), (3, 3, 0)):
        with pytest.raises(ValueError, match="do not fit one another"):
            places(np.ones(w, np.float32), np.ones(c, np.uint8), np.ones(s, np.float32), 3)


def slow_change_error(doubled: list[int], step: int, bits: int) -> int:
    """Four times the squared error of changes, each given twice and plus 1 at odd places."""
    kept = [step * (2 * slow_code(each, step, bits) - zero(bits)) for each in doubled]
    return sum((2 * (each // 2) - value) ** 2 for each, value in zip(doubled, kept, strict=True))


def zero(bits: int) -> int:
    return 256 if bits == 8 else 2**bits - 1


def slow_code(doubled: int, step: int, bits: int) -> int:
    change, odd = divmod(doubled, 2)
    if bits == 8:
        return min(max((2 * change + step) // (2 * step) + 128, 1), 255)
    return min(max((change + (step << (bits - 1)) - odd) // step, 0), (1 << bits) - 1)


def slow_step(doubled: list[int], bits: int) -> int:
    """Three series of twelve steps, each judged by every weight."""
    reach = 254 if bits == 8 else 2**bits - 1
    best = high = max(1, -(-2 * max(abs(each // 2) for each in doubled) // reach))
    low = 1
    for _ in range(3):
        tried = sorted({best, *(round(low * (high / low) ** (place / 11)) for place in range(12))})
        errors = [slow_change_error(doubled, step, bits) for step in tried]
        place = errors.index(min(errors))
        best, low, high = tried[place], tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    return best


@given(
    st.integers(1, 8), st.integers(1, 3), st.integers(1, 60), st.integers(0, 255), st.integers(0, 2**32 - 1)
)
def test_changes_are_coded_as_by_whole_numbers_one_by_one(
    bits: int, rows: int, row: int, spread: int, seed: int
) -> None:
    """Codes far apart are few in a wide range, those near are many in a small one."""
    draws = np.random.default_rng(seed)
    sent = draws.integers(0, 256, (rows, row)).astype(np.uint8)
    trained = np.clip(sent + draws.integers(-spread, spread + 1, (rows, row)), 0, 255).astype(np.uint8)
    fractions = draws.integers(-128, 128, (rows, row)).astype(np.int8)
    steps, codes = code_changes(sent, trained, fractions, rows, bits)
    changes = 256 * (trained.astype(int) - sent) + fractions
    for r in range(rows):
        doubled = [2 * int(change) + place % 2 for place, change in enumerate(changes[r])]
        assert steps[r] == slow_step(doubled, bits)
        found = codes.reshape(rows, row)[r].tolist()
        assert found == [slow_code(each, int(steps[r]), bits) for each in doubled]


def test_changes_that_do_not_fit_are_refused() -> None:
    codes, fractions = np.ones(6, np.uint8), np.ones(6, np.int8)
    for bits in (0, 9):
        with pytest.raises(KernelError, match="code_changes"):
            code_changes(codes, codes, fractions, 2, bits)
    with pytest.raises(KernelError, match="code_changes"):
        code_changes(codes[:0], codes[:0], fractions[:0], 2, 4)
    for other, few, rows in ((codes[1:], fractions, 2), (codes, fractions[1:], 2), (codes, fractions, 4)):
        with pytest.raises(ValueError, match="do not fit one another"):
            code_changes(codes, other, few, rows, 4)
