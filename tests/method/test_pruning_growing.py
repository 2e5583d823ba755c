"""Alg. 2: both rules keep the budget, fill it, and equal slow transcriptions of themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.method.pruning_growing import BudgetError, deal_best, deal_paper
from tests.cost import cpu_seconds

Layers = list[tuple[int, int, int]]

layer_lists = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 40_000), st.integers(-7, 7)), min_size=1, max_size=12
)
budgets = st.one_of(
    st.integers(1, 8), st.sampled_from([2.5, 1.25, 7.999]), st.floats(1, 8), st.fractions(1, 8)
)


def require_dealt_out(
    widths: Sequence[int], sizes: Sequence[int], budget: float | Fraction, most: int = 8
) -> None:
    """The invariant: within the budget, within 1..most, and no layer could take one more bit."""
    allowed = Fraction(budget) * sum(sizes)
    stored = sum(bits * size for bits, size in zip(widths, sizes, strict=True))
    assert stored <= allowed
    assert all(1 <= bits <= most for bits in widths)
    for bits, size in zip(widths, sizes, strict=True):
        assert bits == most or stored + size > allowed


def most_bits(budget: float | Fraction) -> int:
    """Of the best rule: six, unless the budget is greater."""
    return 6 if budget <= 6 else 8


def slow_paper(
    bit_widths: Sequence[int], sizes: Sequence[int], growth: Sequence[int], budget: float | Fraction
) -> tuple[int, ...]:
    """Alg. 2 as printed, one bit at a time, with the average recomputed as a fraction."""
    widths = list(bit_widths)

    def average() -> Fraction:
        return Fraction(sum(b * m for b, m in zip(widths, sizes, strict=True)), sum(sizes))

    scores = [size * (grown + 1) for size, grown in zip(sizes, growth, strict=True)]
    order: list[int] = []
    while len(order) < len(sizes):
        rest = [layer for layer in range(len(sizes)) if layer not in order]
        order.append(next(layer for layer in rest if scores[layer] == max(scores[r] for r in rest)))
    current = 0
    while average() > Fraction(budget):
        if widths[order[current]] > 1:
            widths[order[current]] -= 1
        else:
            current += 1
    for layer in order[::-1]:
        while widths[layer] < 8 and average() < Fraction(budget):
            widths[layer] += 1
            if average() > Fraction(budget):
                widths[layer] -= 1
                break
    return tuple(widths)


def slow_best(
    sizes: Sequence[int], errors: NDArray[np.float64], budget: float | Fraction, floor: int
) -> tuple[int, ...]:
    """From the floor, or from the whole bits of the budget if that ends with a tenth less error."""
    least = floor if floor <= Fraction(budget) else 1
    ends = [slow_growth(sizes, errors, budget, start) for start in (least, max(least, math.floor(budget)))]
    totals = [sum(float(errors[layer, bits - 1]) for layer, bits in enumerate(widths)) for widths in ends]
    return ends[1] if totals[1] < 0.9 * totals[0] else ends[0]


def slow_growth(
    sizes: Sequence[int], errors: NDArray[np.float64], budget: float | Fraction, start: int
) -> tuple[int, ...]:
    """Look at every layer for every bit."""
    allowed, most = Fraction(budget) * sum(sizes), most_bits(budget)
    widths = [start] * len(sizes)
    while True:
        stored = sum(b * m for b, m in zip(widths, sizes, strict=True))
        open_layers = [
            layer for layer, bits in enumerate(widths) if bits < most and stored + sizes[layer] <= allowed
        ]
        if not open_layers:
            return tuple(widths)
        gains = [
            (float(errors[layer, widths[layer] - 1]) - float(errors[layer, widths[layer]])) / sizes[layer]
            for layer in open_layers
        ]
        widths[open_layers[gains.index(max(gains))]] += 1


@given(layer_lists, budgets)
def test_paper_rule_keeps_and_fills_the_budget(layers: Layers, budget: float | Fraction) -> None:
    bit_widths, sizes, growth = zip(*layers, strict=True)
    require_dealt_out(deal_paper(bit_widths, sizes, growth, budget), sizes, budget)


@given(layer_lists, budgets)
def test_paper_rule_equals_its_transcription(layers: Layers, budget: float | Fraction) -> None:
    bit_widths, sizes, growth = zip(*layers, strict=True)
    assert deal_paper(bit_widths, sizes, growth, budget) == slow_paper(bit_widths, sizes, growth, budget)


@pytest.mark.parametrize(
    ("bit_widths", "sizes", "growth", "budget", "expected"),
    [
        # Order 0, 1 (100 > 10). Stored 440, allowed 220: layer 0 gives 3 bits (140 left), layer 1 takes 4
        # (180).
        ((4, 4), (100, 10), (0, 0), 2, (1, 8)),
        # The same, but layer 0 pruned a bit last round (score 0): layer 1 gives first (3 bits), then layer 0
        # gives 2 (210 left); layer 0 is last in order but 100 does not fit, so layer 1 takes the 10 that are
        # left.
        ((4, 4), (100, 10), (-1, 0), 2, (2, 2)),
        # Equal scores keep their order: the first layer loses, the last gains.
        ((3, 3), (10, 10), (0, 0), 2, (1, 3)),
        # Already within the budget: 60 of 90 stored, all room goes to the last layer.
        ((2, 2, 2), (10, 10, 10), (0, 0, 0), 3, (2, 2, 5)),
        # The last layer fills to 8, then the one before, then the first as well.
        ((1, 1, 1), (10, 10, 10), (0, 0, 0), 7, (5, 8, 8)),
        ((1, 1), (10, 10), (0, 0), 8, (8, 8)),
        # A negative score sorts last: the large layer that lost 2 bits is the first to gain.
        ((2, 2), (30, 10), (-2, 0), 2.75, (3, 2)),
        # 2.5 bits of 4 weights is exactly 10.
        ((2, 2), (2, 2), (0, 0), 2.5, (2, 3)),
        # The large last layer (score 0) does not fit its next bit; the small first one still gets all it can.
        ((1, 1), (3, 50), (0, -1), 1.25, (5, 1)),
        ((8,), (7,), (0,), 1, (1,)),
        ((1,), (3,), (0,), 2.5, (2,)),
    ],
)
def test_paper_rule_by_hand(
    bit_widths: tuple[int, ...],
    sizes: tuple[int, ...],
    growth: tuple[int, ...],
    budget: float,
    expected: tuple[int, ...],
) -> None:
    assert deal_paper(bit_widths, sizes, growth, budget) == expected


@st.composite
def error_tables(draw: st.DrawFn) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    sizes = tuple(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=9)))
    # Few distinct values make ties and negative gains common.
    values = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6))
    row = st.lists(values, min_size=8, max_size=8)
    return sizes, np.array(draw(st.lists(row, min_size=len(sizes), max_size=len(sizes))))


@given(error_tables(), budgets, st.integers(1, 8))
def test_best_rule_keeps_the_budget_and_equals_its_slow_twin(
    layers: tuple[tuple[int, ...], NDArray[np.float64]], budget: float | Fraction, floor: int
) -> None:
    sizes, errors = layers
    widths = deal_best(sizes, errors, budget, floor)
    require_dealt_out(widths, sizes, budget, most_bits(budget))
    assert widths == slow_best(sizes, errors, budget, floor)
    assert floor > budget or min(widths) >= floor
    asked: set[int] = set()

    def error(layer: int, bits: int) -> float:
        asked.add(bits)
        return float(errors[layer, bits - 1])

    assert deal_best(sizes, error, budget, floor) == widths
    assert min(asked) >= (floor if floor <= budget else 1)
    assert max(asked) <= max(most_bits(budget), floor)


def test_an_error_that_is_asked_for_and_not_finite_is_named() -> None:
    with pytest.raises(BudgetError, match=r"errors\[1\]\[2\] is nan; the error of layer 1 at 3 bits"):
        deal_best((5, 5), lambda layer, bits: math.nan if (layer, bits) == (1, 3) else 1.0 / bits, 4)


@given(st.integers(2, 4), st.fractions(2, 8), st.integers(0, 2**32 - 1))
def test_best_rule_is_optimal_for_equal_layers_and_convex_errors(
    layers: int, budget: Fraction, seed: int
) -> None:
    falls = np.sort(np.random.default_rng(seed).random((layers, 7)), axis=1)
    errors = np.concatenate([np.zeros((layers, 1)), falls], axis=1).cumsum(axis=1)[:, ::-1]
    allowed = int(budget * layers)
    every = itertools.product(range(2, most_bits(budget) + 1), repeat=layers)
    total = np.array(
        [sum(errors[i, b - 1] for i, b in enumerate(widths)) for widths in every if sum(widths) <= allowed]
    )
    dealt = deal_best((5,) * layers, errors, budget)
    assert sum(errors[i, b - 1] for i, b in enumerate(dealt)) == pytest.approx(total.min(), abs=1e-12)


def halving(first: float) -> list[float]:
    return [first / 4**bits for bits in range(8)]


def test_best_rule_by_hand() -> None:
    # Per stored bit, layer 1 removes ten times what layer 0 does at the same width; each bit is worth a
    # quarter of the one before, so it is dealt two bits ahead of layer 0. Allowed 4 * 20: 40 at the floor, 4
    # bits to deal.
    errors = np.array([halving(1.0), halving(10.0)])
    assert deal_best((10, 10), errors, 4) == (3, 5)
    # The same errors per layer, but layer 1 is 100 times as large: a bit there is now the poorer buy.
    assert deal_best((10, 1000), errors, Fraction(204, 101)) == (4, 2)


def test_best_rule_gives_equal_gains_to_the_lower_layer() -> None:
    assert deal_best((10, 10, 10), np.zeros((3, 8)), Fraction(7, 3)) == (3, 2, 2)
    assert deal_best((10, 10, 10), np.zeros((3, 8)), 3) == (5, 2, 2)


def test_best_rule_deals_a_harmful_bit_last_but_deals_it() -> None:
    errors = np.array([[8.0, 1, 2, 2, 2, 2, 2, 2], [8.0, 7, 6, 5, 4, 3, 2, 1]])
    assert deal_best((1, 1), errors, 4) == (2, 6)
    assert deal_best((1, 1), errors, 4.5) == (3, 6)


def test_best_rule_goes_beyond_six_bits_only_with_the_budget() -> None:
    errors = np.array([halving(1.0), halving(1e9)])
    assert deal_best((1, 1), errors, 4) == (2, 6)
    assert deal_best((1, 1), errors, 6) == (6, 6)
    assert deal_best((1, 1), errors, 6.5) == (5, 8)
    assert deal_best((1, 1), errors, 8) == (8, 8)


def test_best_rule_does_not_starve_a_large_layer() -> None:
    # Greed gives the small layers six bits each, and 2,536 bits are left for a layer of 4,096 weights.
    errors = np.array([halving(1.0)] * 3)
    assert deal_best((200, 4096, 320), errors, 3) == (3, 3, 3)
    assert deal_best((200, 4096, 320), errors, 2.5) == (6, 2, 6)


def test_best_rule_starts_at_one_bit_when_the_floor_exceeds_the_budget() -> None:
    errors = np.array([halving(1.0), halving(1.0)])
    assert deal_best((10, 30), errors, 1.9) == (4, 1)
    assert min(deal_best((10, 30), errors, 2)) == 2


def test_a_float_budget_counts_as_its_exact_value() -> None:
    # float 2.3 is below 2.3 by 2e-16: 10 weights may store 22 bits, not 23.
    assert deal_paper((1,) * 10, (1,) * 10, (0,) * 10, 2.3).count(8) == 1
    assert sum(deal_paper((1,) * 10, (1,) * 10, (0,) * 10, 2.3)) == 22
    assert sum(deal_paper((1,) * 10, (1,) * 10, (0,) * 10, Fraction("2.3"))) == 23


def test_sizes_beyond_32_bits_do_not_wrap() -> None:
    sizes = tuple(np.array([2**30, 2**30, 2**30], np.int32))
    assert deal_paper((8, 8, 8), sizes, (0, 0, 0), 4) == (1, 3, 8)
    assert deal_best(sizes, np.zeros((3, 8)), 4) == (6, 4, 2)


def test_time_grows_little_faster_than_the_number_of_layers() -> None:
    """Eight times the layers took ten times as long; to try all pairs of layers would take 64 times."""

    def dealing(layers: int) -> Callable[[], None]:
        generator = np.random.default_rng(5)
        sizes = tuple(int(size) for size in generator.integers(400, 2_000_000, layers))
        errors = np.sort(generator.random((layers, 8)))[:, ::-1]

        def deal() -> None:
            for budget in (2, 4, 6, 7.5):
                require_dealt_out(deal_best(sizes, errors, budget), sizes, budget, most_bits(budget))
                require_dealt_out(deal_paper((8,) * layers, sizes, (0,) * layers, budget), sizes, budget)

        return deal

    assert cpu_seconds(dealing(480)) < 32 * cpu_seconds(dealing(60))


@pytest.mark.parametrize("budget", [0.99, 0, -1, 8.01, float("inf"), float("nan"), Fraction(17, 2)])
def test_a_budget_outside_1_to_8_is_refused(budget: float | Fraction) -> None:
    with pytest.raises(BudgetError, match="budget"):
        deal_paper((2,), (3,), (0,), budget)
    with pytest.raises(BudgetError, match="budget"):
        deal_best((3,), np.zeros((1, 8)), budget)


def test_malformed_layers_are_refused() -> None:
    with pytest.raises(BudgetError, match="bit_widths has 1 entries"):
        deal_paper((2,), (3, 4), (0, 0), 2)
    with pytest.raises(BudgetError, match="growth has 3 entries"):
        deal_paper((2, 2), (3, 4), (0, 0, 0), 2)
    with pytest.raises(BudgetError, match=r"sizes\[1\] is 0"):
        deal_paper((2, 2), (3, 0), (0, 0), 2)
    with pytest.raises(BudgetError, match=r"bit_widths\[1\] is 9"):
        deal_paper((2, 9), (3, 4), (0, 0), 2)
    with pytest.raises(BudgetError, match="sizes is empty"):
        deal_paper((), (), (), 2)
    with pytest.raises(BudgetError, match="floor is 0"):
        deal_best((3,), np.zeros((1, 8)), 2, floor=0)
    with pytest.raises(BudgetError, match="shape"):
        deal_best((3, 4), np.zeros((1, 8)), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_names_its_layer(bad: float) -> None:
    errors = np.zeros((3, 8))
    errors[1, 4] = bad
    with pytest.raises(BudgetError, match="layer 1 at 5 bits"):
        deal_best((3, 4, 5), errors, 2)
