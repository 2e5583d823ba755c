"""Sums of whole numbers: the same bytes in any order, grouping and tree, and equal to those of Python."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.exchange.change import change_of, change_within_cells
from fedmpq.method import integer_products
from fedmpq.method.aggregate import MergeError
from fedmpq.method.integer_products import scalar_products
from fedmpq.method.integer_sum import MAX_BOARDS, MAX_TOTAL, MAX_WEIGHT, IntegerSum, whole_weights
from fedmpq.method.origins import MAX_CHANGE, Origin, greatest_step
from fedmpq.model.grid import code_range, zero_point
from fedmpq.model.quantized import PackedLayer, QuantizedLayer
from tests.kernels.slow_changes import slow_change


@dataclass(frozen=True)
class Board:
    origin: Origin
    returned: PackedLayer
    weight: int

    def changes(self) -> list[int]:
        """By the formula, weight by weight."""
        size = self.origin.size
        row = size // max(1, self.returned.step.size)
        codes = self.returned.unpack((size,)).codes.tolist()
        steps = [
            8 * min(int(step), greatest_step(self.origin.bits)) for step in self.returned.step.reshape(-1)
        ]
        if not self.origin.carried:
            steps = [1] * len(steps)
        return [
            slow_change(code, steps[j // row], int(place), self.returned.bits, self.origin.carried)
            for j, (code, place) in enumerate(zip(codes, self.origin.places, strict=True))
        ]


@dataclass(frozen=True)
class Fleet:
    origins: dict[int, Origin]
    boards: list[Board]

    @classmethod
    def drawn(
        cls, seed: int, widths: list[int], shape: tuple[int, int], per_channel: bool, carried: bool
    ) -> Fleet:
        random = np.random.default_rng(seed)
        weights = random.normal(0, 0.3, shape).astype(np.float32)
        # One weight far beyond the others: least error leaves it outside of the codes.
        weights[0, 0] *= 40
        sent = {b: QuantizedLayer.from_weights(weights, b, "least_error", per_channel) for b in set(widths)}
        origins = {
            b: Origin.of_carried("l", weights, layer) if carried else Origin.of_codes("l", layer)
            for b, layer in sent.items()
        }
        boards = []
        for bits in widths:
            came = bits if carried else int(random.integers(1, bits + 1))
            codes = random.integers(0, 2**came, shape).astype(np.uint8)
            step = sent[bits].step
            if carried:
                step = np.floor(2.0 ** random.uniform(0, 12, step.shape)).astype(np.float32)
            layer = QuantizedLayer(codes, came, np.asarray(step)).pack()
            boards.append(Board(origins[bits], layer, int(random.integers(0, MAX_WEIGHT + 1))))
        return cls(origins, boards)

    @property
    def size(self) -> int:
        return self.boards[0].origin.size

    def sum_of(self, boards: Sequence[Board]) -> IntegerSum:
        total = IntegerSum(self.size)
        for board in boards:
            total.add(board.origin, board.returned, board.weight)
        return total


fleets = st.builds(
    Fleet.drawn,
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    per_channel=st.booleans(),
    carried=st.booleans(),
)


def in_a_tree(fleet: Fleet, boards: list[Board], data: st.DataObject) -> IntegerSum:
    """The boards cut in two at random, again and again; some sums go through their bytes."""
    if len(boards) <= 1 or data.draw(st.booleans()):
        found = fleet.sum_of(boards)
    else:
        cut = data.draw(st.integers(0, len(boards)))
        found = in_a_tree(fleet, boards[:cut], data) if cut < len(boards) else fleet.sum_of(boards[:cut])
        found.merge(fleet.sum_of(boards[cut:]) if cut == 0 else in_a_tree(fleet, boards[cut:], data))
    return IntegerSum.from_bytes(found.to_bytes()) if data.draw(st.booleans()) else found


@settings(max_examples=60)
@given(fleets, st.data())
def test_any_order_and_any_tree_give_the_same_bytes(fleet: Fleet, data: st.DataObject) -> None:
    expected = fleet.sum_of(fleet.boards)
    shuffled = data.draw(st.permutations(fleet.boards))
    found = in_a_tree(fleet, shuffled, data)
    assert found.to_bytes() == expected.to_bytes()
    assert found.weight == expected.weight == sum(board.weight for board in fleet.boards)
    assert found.value(fleet.origins).tobytes() == expected.value(fleet.origins).tobytes()


@settings(max_examples=60)
@given(fleets)
def test_the_sum_is_that_of_whole_numbers_one_weight_at_a_time(fleet: Fleet) -> None:
    slow = {bits: [0] * fleet.size for bits in fleet.origins}
    for board in fleet.boards:
        changes = board.changes()
        assert max(map(abs, changes)) < MAX_CHANGE
        sums = slow[board.origin.bits]
        slow[board.origin.bits] = [s + board.weight * c for s, c in zip(sums, changes, strict=True)]
    total = fleet.sum_of(fleet.boards)
    data = total.to_bytes()
    for bits in sorted(slow, reverse=True):
        if any(board.weight for board in fleet.boards if board.origin.bits == bits):
            assert np.frombuffer(data[-8 * fleet.size :], "<i8").tolist() == slow[bits]
            data = data[: -8 * fleet.size]
    found = total.value(fleet.origins)
    for place in range(fleet.size):
        exact, size = Fraction(0), Fraction(0)
        for bits, origin in fleet.origins.items():
            step = origin.step.reshape(-1)[place * max(1, origin.step.size) // fleet.size]
            part = slow[bits][place] * Fraction(float(step)) / (4096 if origin.carried else 2)
            exact, size = exact + part, size + abs(part)
        assert abs(Fraction(float(found[place])) - exact) <= size * Fraction(1, 2**49)


@settings(max_examples=60)
@given(fleets)
def test_scalar_products_are_exact_in_each_row(fleet: Fleet) -> None:
    boards = fleet.boards
    found = scalar_products([b.origin for b in boards], [b.returned for b in boards])
    changes = [board.changes() for board in boards]
    rows = max(1, boards[0].origin.step.size)
    row = fleet.size // rows
    for n, one in enumerate(boards):
        for k, other in enumerate(boards):
            total, size = Fraction(0), Fraction(0)
            for r in range(rows):
                place = slice(r * row, (r + 1) * row)
                whole = sum(a * b for a, b in zip(changes[n][place], changes[k][place], strict=True))
                part = (
                    Fraction(float(one.origin.unit[r, 0])) * Fraction(float(other.origin.unit[r, 0])) * whole
                )
                total, size = total + part, size + abs(part)
            assert abs(Fraction(float(found[n, k])) - total) <= size * Fraction(1, 2**48)
    assert (found == found.T).all()


@pytest.mark.parametrize("at_once", [1, 30, 1 << 20])
def test_products_do_not_depend_on_how_many_columns_are_taken_at_a_time(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet.drawn(seed=5, widths=[2, 8, 4, 2, 6, 4, 1], shape=(3, 41), per_channel=True, carried=True)
    origins, returned = [b.origin for b in fleet.boards], [b.returned for b in fleet.boards]
    expected = scalar_products(origins, returned)
    monkeypatch.setattr(integer_products, "_AT_ONCE", at_once)
    monkeypatch.setattr(integer_products, "_FEWEST_COLUMNS", 1)
    assert scalar_products(origins, returned).tobytes() == expected.tobytes()


def test_products_that_53_bits_do_not_hold_are_exact() -> None:
    """The greatest changes there can be, of more weights than one product may add up."""
    weights = np.full((1, 5000), -(2.0**20), np.float32)
    weights[0, 2500:] = 1.0
    sent = QuantizedLayer(np.full((1, 5000), 1, np.uint8), 8, np.array(1.0, np.float32))
    origin = Origin.of_carried("l", weights, sent)
    change = QuantizedLayer(np.full((1, 5000), 255, np.uint8), 8, np.array(600, np.float32)).pack()
    board = Board(origin, change, 1)
    found = scalar_products([origin], [change])
    assert found[0, 0] == float(sum(c * c for c in board.changes())) / 4096**2
    assert sum(c * c for c in board.changes()) > 2**53


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_change_in_whole_numbers_is_the_change_in_floats(bits: int, per_channel: bool) -> None:
    """But for half a unit, and where the client ended just between two codes, where rounding decides."""
    random = np.random.default_rng(bits)
    weights = random.normal(0, 0.3, (5, 400)).astype(np.float32)
    sent = QuantizedLayer.from_weights(weights, bits, "least_error", per_channel)
    low, high = code_range(bits)
    trained = np.clip(sent.codes + random.integers(-1, 2, (5, 400)), low, high).astype(np.uint8)
    change = change_of(sent, replaced(sent, trained), random.integers(-128, 128, 2000).astype(np.int8))
    assert (change.step <= greatest_step(bits)).all()
    steps = sent.step.reshape(-1, 1)
    ended = (change.codes - zero_point(bits)) * change.step.reshape(-1, 1) / 256 + zero_point(bits)
    between = np.abs(np.abs(ended - np.rint(ended)) - 0.5) < 1e-3
    origin = Origin.of_carried("l", weights, sent)
    found = origin.changes([change.pack()]).of(0, 2000).reshape(5, 400) * origin.unit
    expected = change_within_cells(weights, sent, change)
    off = np.abs(found - expected) / steps
    assert off[~between].max() <= 1 / 4096
    assert between.mean() < 0.5


def replaced(layer: QuantizedLayer, codes: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> QuantizedLayer:
    return QuantizedLayer(codes, layer.bits, layer.step)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.booleans())
def test_places_are_where_the_weights_lie(seed: int, bits: int, per_channel: bool) -> None:
    random = np.random.default_rng(seed)
    weights = random.standard_t(2, (3, 11)).astype(np.float32)
    sent = QuantizedLayer.from_weights(weights, bits, "least_error", per_channel)
    low, high = code_range(bits)
    steps = np.broadcast_to(sent.step.reshape(-1, 1), weights.shape).reshape(-1)
    places = Origin.of_carried("l", weights, sent).places
    for place, weight, step, code in zip(
        places, weights.reshape(-1), steps, sent.codes.reshape(-1), strict=True
    ):
        exact = 4096 * (Fraction(float(weight)) / Fraction(float(step)) + Fraction(zero_point(bits)))
        assert min(max((int(place) + 2048) // 4096, low), high) == code
        beyond = exact < (low - 256) * 4096 or exact > (high + 256) * 4096
        assert beyond or abs(int(place) - exact) <= 1 + abs(exact) / 2**22


def test_an_int64_holds_the_greatest_number_of_the_heaviest_boards() -> None:
    weights = np.full((1, 3), -1e9, np.float32)
    sent = QuantizedLayer(np.full((1, 3), 1, np.uint8), 8, np.array(1.0, np.float32))
    origin = Origin.of_carried("l", weights, sent)
    change = QuantizedLayer(np.full((1, 3), 255, np.uint8), 8, np.array(512, np.float32)).pack()
    (most, *_) = Board(origin, change, 1).changes()
    assert MAX_CHANGE * 0.99 < most < MAX_CHANGE
    total = IntegerSum(3)
    total.add(origin, change, MAX_WEIGHT)
    for _ in range(MAX_BOARDS.bit_length() - 1):
        total.merge(IntegerSum.from_bytes(total.to_bytes()))
    assert total.weight == MAX_TOTAL == MAX_BOARDS * MAX_WEIGHT
    assert np.frombuffer(total.to_bytes()[-24:], "<i8").tolist() == [most * MAX_TOTAL] * 3
    before = total.to_bytes()
    for refused in (lambda: total.add(origin, change, 1), lambda: total.merge(one_board(origin, change))):
        with pytest.raises(MergeError, match=f"at most {MAX_BOARDS} boards"):
            refused()
    assert total.to_bytes() == before


def one_board(origin: Origin, change: PackedLayer) -> IntegerSum:
    total = IntegerSum(origin.size)
    total.add(origin, change, 1)
    return total


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    for carried in (True, False):
        fleet = Fleet.drawn(1, [4, 3], (3, 5), True, carried)
        board, other = fleet.boards
        total = fleet.sum_of([board])
        before = total.to_bytes()
        odd = PackedLayer(board.returned.planes, board.returned.step + np.float32(0.5))
        padded = PackedLayer(board.returned.planes | np.uint8(0x80), board.returned.step)
        wide = PackedLayer(np.zeros((8, 2), np.uint8), board.returned.step)
        single = PackedLayer(board.returned.planes, np.array(1.0, np.float32))
        longer = PackedLayer(np.zeros((4, 3), np.uint8), board.returned.step)
        for origin, layer, weight, message in (
            (board.origin, odd, 1, "whole number" if carried else "other steps"),
            (board.origin, padded, 1, "padding bits"),
            (board.origin, wide, 1, "bits"),
            (board.origin, single, 1, "came back with 1 steps; it was sent 3"),
            (board.origin, longer, 1, "planes of 3 bytes"),
            (board.origin, board.returned, -1, "within 0"),
            (board.origin, board.returned, MAX_WEIGHT + 1, "within 0"),
        ):
            with pytest.raises(MergeError, match=message):
                total.add(origin, layer, weight)
        with pytest.raises(MergeError, match="a sum of 14 weights cannot be added to one of 15"):
            total.merge(IntegerSum(14))
        with pytest.raises(MergeError, match="15 weights, this sum 14"):
            IntegerSum(14).add(other.origin, other.returned, 1)
        assert total.to_bytes() == before


def stored(size: object, weight: object, bits: object, sums: bytes) -> bytes:
    header = json.dumps({"size": size, "weight": weight, "bits": bits}).encode()
    return b"fedmpq integer sum 1\n" + len(header).to_bytes(8, "little") + header + sums


def test_bytes_that_are_no_sum_are_refused() -> None:
    good = stored(2, 3, [4], np.array([5, -7], "<i8").tobytes())
    assert IntegerSum.from_bytes(good).weight == 3
    eight = bytes(8)
    for bad, message in (
        (b"", "no integer sum"),
        (b"x" + good, "no integer sum"),
        (good[:-1], "bytes, not"),
        (good + b"\0", "bytes, not"),
        (good[:24], "no integer sum"),
        (b"fedmpq integer sum 1\n" + (2**60).to_bytes(8, "little"), "cannot be read"),
        (stored(1, 3, [0], eight), "cannot be"),
        (stored(1, 3, [9], eight), "cannot be"),
        (stored(1, 3, [4, 4], 2 * eight), "cannot be"),
        (stored(1, 3, [5, 4], 2 * eight), "cannot be"),
        (stored(1, 3, [[4]], eight), "cannot be"),
        (stored(1, 3, "4", eight), "cannot be"),
        (stored(-1, 3, [], b""), "cannot be"),
        (stored(1, -3, [4], eight), "cannot be"),
        (stored(1.0, 3, [4], eight), "cannot be"),
        (stored(True, 3, [4], eight), "cannot be"),
        (stored(1, MAX_TOTAL + 1, [4], eight), "might not fit 64 bits"),
        (stored(1, 0, [4], eight), "more than weights of 0"),
        (stored(1, 3, [4], np.array([3 * MAX_CHANGE], "<i8").tobytes()), "more than weights of 3"),
        (stored(1, 3, [4], np.array([-3 * MAX_CHANGE], "<i8").tobytes()), "more than weights of 3"),
    ):
        with pytest.raises(MergeError, match=message):
            IntegerSum.from_bytes(bad)


@given(st.lists(st.integers(0, MAX_WEIGHT - 1), min_size=1).filter(any))
def test_counts_of_samples_keep_their_ratios(samples: list[int]) -> None:
    found = whole_weights(samples, max(samples))
    assert MAX_WEIGHT / 2 <= max(found) < MAX_WEIGHT
    assert all(w * max(samples) == max(found) * d for w, d in zip(found, samples, strict=True))


@given(st.lists(st.floats(0, 1e6), min_size=1).filter(any), st.floats(1, 1e6))
def test_weights_are_rounded_and_none_that_counts_is_lost(weights: list[float], more: float) -> None:
    largest = max(weights) * more
    found = whole_weights(weights, largest)
    exponent = 22 - math.frexp(largest)[1]
    for whole, weight in zip(found, weights, strict=True):
        assert 0 <= whole <= MAX_WEIGHT
        assert (whole > 0) == (weight > 0)
        assert abs(whole - math.ldexp(weight, exponent)) <= 0.5 or whole == 1


@pytest.mark.parametrize("weights", [[-1.0], [2.5], [math.nan], [math.inf]])
def test_weights_beyond_the_largest_are_refused(weights: list[float]) -> None:
    with pytest.raises(MergeError, match="it must be within"):
        whole_weights(weights, 2.0)
    for largest in (0.0, math.inf, math.nan):
        with pytest.raises(MergeError, match="must be positive and finite"):
            whole_weights([0.0], largest)
