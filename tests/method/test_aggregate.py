"""Merging: the formulas in exact arithmetic, the running sum against a plain one, and what it refuses."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.method.aggregate import (
    MergeError,
    WeightedSum,
    average_bit_widths,
    merge_deltas,
    merge_models,
    moved_towards,
    moving_share,
    participation_weights,
)

Tensors = dict[str, NDArray[np.float32]]

clients = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 60_000), st.integers(1, 8)), min_size=1, max_size=40
).filter(lambda group: any(count for _, count, _ in group))


def tensors(seed: int) -> Tensors:
    generator = np.random.default_rng(seed)
    shapes = {"conv1": (4, 3, 3, 3), "fc": (10, 8), "relu.quantized.clip": ()}
    return {
        name: np.asarray(generator.normal(size=shape), dtype=np.float32) for name, shape in shapes.items()
    }


@given(clients)
def test_participation_weights_are_the_formula(group: list[tuple[int, int, int]]) -> None:
    total = sum(v * count for v, count, _ in group)
    weights = participation_weights([v for v, _, _ in group], [count for _, count, _ in group])
    assert weights.dtype == np.float64
    assert weights.tolist() == pytest.approx([v * count / total for v, count, _ in group], rel=1e-15)


def test_equal_budgets_weigh_by_data_alone() -> None:
    assert participation_weights([1, 1, 1], [10, 30, 60]).tolist() == [0.1, 0.3, 0.6]


@given(clients)
def test_average_bit_widths_equal_exact_arithmetic(group: list[tuple[int, int, int]]) -> None:
    total = sum(v * count for v, count, _ in group)
    exact = sum(Fraction(v * count * bits, total) for v, count, bits in group)
    weights = participation_weights([v for v, _, _ in group], [count for _, count, _ in group])
    widths = average_bit_widths(weights, [(bits, 9 - bits) for _, _, bits in group])
    assert widths == (math.floor(exact + Fraction(1, 2)), math.floor(9 - exact + Fraction(1, 2)))


def test_an_exact_half_rounds_up_in_spite_of_float_noise() -> None:
    # Thirds, sevenths and the like leave 2.4999999999999996 or so for many of these; each mean is exactly
    # 2.5.
    for clients_per_side in range(1, 200):
        weights = participation_weights([1] * 2 * clients_per_side, [7] * 2 * clients_per_side)
        widths = [(2,)] * clients_per_side + [(3,)] * clients_per_side
        assert average_bit_widths(weights, widths) == (3,)
    assert average_bit_widths(np.array([0.5 + 1e-15, 0.5 - 1e-15]), [(2,), (3,)]) == (3,)
    # One sample in a million short of a half is short of it.
    assert average_bit_widths(participation_weights([8, 8], [10**6 + 1, 10**6]), [(2,), (3,)]) == (2,)


def test_average_bit_widths_are_clamped() -> None:
    assert average_bit_widths(np.array([1.0]), [(0, 9, 5)]) == (1, 8, 5)


def test_average_bit_widths_refuse_what_does_not_fit() -> None:
    with pytest.raises(MergeError, match="2 weights but 1"):
        average_bit_widths(np.array([0.5, 0.5]), [(2, 3)])
    with pytest.raises(MergeError, match=r"bit_widths\[1\] has 1 layers"):
        average_bit_widths(np.array([0.5, 0.5]), [(2, 3), (2,)])
    with pytest.raises(MergeError, match="sum to 3"):
        average_bit_widths(np.array([1.0, 2.0]), [(2,), (2,)])
    with pytest.raises(MergeError, match="0 weights"):
        average_bit_widths(np.array([]), [])


def test_participation_weights_refuse_what_has_no_share() -> None:
    with pytest.raises(MergeError, match="2 budgets but 1"):
        participation_weights([1, 2], [3])
    with pytest.raises(MergeError, match="no client has any samples"):
        participation_weights([1, 2], [0, 0])
    with pytest.raises(MergeError, match="no client has any samples"):
        participation_weights([], [])
    with pytest.raises(MergeError, match=r"samples\[0\] is -1"):
        participation_weights([1, 2], [-1, 5])
    for bad in (0, -2, math.nan, math.inf):
        with pytest.raises(MergeError, match=r"budgets\[1\]"):
            participation_weights([1, bad], [5, 5])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_the_mean_equals_a_correctly_rounded_one(weights: list[float]) -> None:
    total = WeightedSum()
    for seed, weight in enumerate(weights):
        total.add(weight, tensors(seed))
    assert total.count == len(weights)
    for name, mean in total.mean().items():
        assert mean.dtype == np.float32
        assert isinstance(mean, np.ndarray)
        stack = np.stack([tensors(seed)[name].ravel() for seed in range(len(weights))]).astype(np.float64)
        exact = [math.fsum(column * weights) / math.fsum(weights) for column in stack.T]
        np.testing.assert_allclose(mean.ravel(), np.array(exact, np.float32), rtol=1e-6, atol=1e-9)


def test_the_sum_is_carried_in_double_precision() -> None:
    total = WeightedSum()
    for value in (1.0, 2.0**-30, -1.0):
        total.add(1.0, {"w": np.full(3, value, np.float32)})
    assert total.mean()["w"].tolist() == [np.float32(2.0**-30 / 3)] * 3


def test_one_update_comes_back_to_the_bit() -> None:
    total = WeightedSum()
    total.add(1.0, tensors(3))
    for name, mean in merge_models(total).items():
        assert np.array_equal(mean, tensors(3)[name])
        assert mean.shape == tensors(3)[name].shape


def test_the_largest_floats_do_not_overflow() -> None:
    total = WeightedSum()
    for weight in (3.0, 0.7, 1e6):
        total.add(weight, {"w": np.full(2, np.finfo(np.float32).max)})
    assert total.mean()["w"].tolist() == [float(np.finfo(np.float32).max)] * 2


def test_the_same_order_gives_the_same_bits_and_the_inputs_are_left_alone() -> None:
    updates = [(0.1 * (seed + 1), tensors(seed)) for seed in range(7)]
    sums = [WeightedSum(), WeightedSum()]
    for total in sums:
        for weight, update in updates:
            total.add(weight, update)
    first, second = (total.mean() for total in sums)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert all(
        np.array_equal(update[name], tensors(s)[name])
        for s, (_, update) in enumerate(updates)
        for name in update
    )


def test_memory_does_not_grow_with_the_number_of_updates() -> None:
    update = {name: np.ones(50_000, np.float32) for name in ("a", "b")}
    total = WeightedSum()
    total.add(1.0, update)
    tracemalloc.start()
    for _ in range(50):
        total.add(1.0, update)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 50_000 * 8


def test_deltas_move_the_global_model_by_their_mean() -> None:
    weights = tensors(0)
    total = WeightedSum()
    total.add(0.25, tensors(1))
    total.add(0.75, tensors(2))
    merged = merge_deltas(weights, total)
    for name, tensor in merged.items():
        expected = weights[name] + 0.25 * tensors(1)[name] + 0.75 * tensors(2)[name]
        np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-6)
        assert isinstance(tensor, np.ndarray)
        assert tensor.dtype == np.float32
    assert all(np.array_equal(weights[name], tensors(0)[name]) for name in weights)


def test_deltas_of_zero_leave_the_global_model_to_the_bit() -> None:
    total = WeightedSum()
    total.add(0.3, {name: np.zeros_like(tensor) for name, tensor in tensors(0).items()})
    assert all(
        np.array_equal(tensor, tensors(0)[name]) for name, tensor in merge_deltas(tensors(0), total).items()
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_and_leaves_the_sum_as_it_was(bad: float) -> None:
    total = WeightedSum()
    total.add(1.0, tensors(0))
    poisoned = tensors(1)
    poisoned["fc"][3, 4] = bad
    with pytest.raises(MergeError, match="'fc'"):
        total.add(1.0, poisoned)
    with pytest.raises(MergeError, match="weight"):
        total.add(bad, tensors(1))
    assert total.count == 1
    assert np.array_equal(total.mean()["conv1"], tensors(0)["conv1"])


def test_another_layout_is_refused_by_name_and_leaves_the_sum_as_it_was() -> None:
    total = WeightedSum()
    total.add(1.0, tensors(0))
    without = {name: tensor for name, tensor in tensors(1).items() if name != "fc"}
    reshaped = tensors(1) | {"fc": np.zeros((8, 10), np.float32)}
    # A shape that NumPy would broadcast is no better.
    broadcast = tensors(1) | {"fc": np.zeros((1, 8), np.float32)}
    double = tensors(1) | {"fc": np.zeros((10, 8))}
    for update, reason in (
        (without, "missing"),
        (reshaped, "shape"),
        (broadcast, "shape"),
        (double, "float64"),
    ):
        with pytest.raises(MergeError, match=f"'fc'.*{reason}"):
            total.add(1.0, update)  # type: ignore[arg-type]
    with pytest.raises(MergeError, match="'extra' is unknown"):
        total.add(1.0, tensors(1) | {"extra": np.zeros(1, np.float32)})
    assert all(np.array_equal(mean, tensors(0)[name]) for name, mean in total.mean().items())


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(MergeError, match="nothing to divide by"):
        WeightedSum().mean()
    total = WeightedSum()
    total.add(0.0, tensors(0))
    with pytest.raises(MergeError, match="nothing to divide by"):
        merge_models(total)
    with pytest.raises(MergeError, match="not negative"):
        total.add(-0.5, tensors(0))


def test_deltas_must_fit_the_global_model_and_stay_finite() -> None:
    total = WeightedSum()
    total.add(1.0, {"w": np.full(2, 3e38, np.float32)})
    with pytest.raises(MergeError, match="'v' is missing"):
        merge_deltas({"w": np.zeros(2, np.float32), "v": np.zeros(2, np.float32)}, total)
    with pytest.raises(MergeError, match="'w' has shape"):
        merge_deltas({"w": np.zeros(3, np.float32)}, total)
    with pytest.raises(MergeError, match="'w' holds"):
        merge_deltas({"w": np.full(2, 3e38, np.float32)}, total)


@given(st.floats(0.01, 0.99), st.integers(1, 300))
def test_a_moving_share_is_the_newest_models_part_of_the_whole(decay: float, rounds: int) -> None:
    assert moving_share(decay, rounds) == pytest.approx(1 / math.fsum(decay**k for k in range(rounds)))
    assert 1 - decay <= moving_share(decay, rounds) <= 1


def test_the_first_model_is_its_own_average() -> None:
    assert moving_share(0.7, 1) == 1.0
    assert moving_share(4.0, 1) == 1.0
    for name, tensor in moved_towards(tensors(0), tensors(1), 1.0).items():
        assert tensor.tobytes() == tensors(1)[name].tobytes()


@given(st.integers(1, 12), st.integers(1, 40))
def test_from_one_on_a_round_counts_by_a_power_of_its_number(power: int, rounds: int) -> None:
    """Against the weights themselves: `k (k + 1) ... (k + p - 1)`."""
    weights = [math.prod(range(k, k + power)) for k in range(1, rounds + 1)]
    average = 0.0
    for number in range(1, rounds + 1):
        average += moving_share(float(power), number) * (number**2 - average)
    expected = sum(w * k**2 for k, w in enumerate(weights, 1)) / sum(weights)
    assert average == pytest.approx(expected, rel=1e-12)


@given(st.floats(0.05, 0.95), st.integers(1, 12))
def test_moving_round_by_round_gives_the_weighted_mean(decay: float, rounds: int) -> None:
    average = tensors(0)
    for number in range(2, rounds + 1):
        average = moved_towards(average, tensors(number - 1), moving_share(decay, number))
    shares = np.array([decay ** (rounds - 1 - k) for k in range(rounds)])
    for name, found in average.items():
        stack = np.stack([tensors(k)[name] for k in range(rounds)]).astype(np.float64)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.tensordot(shares / shares.sum(), stack, 1), rtol=1e-5, atol=1e-6)


def test_moving_is_carried_in_double_precision_and_leaves_its_inputs_alone() -> None:
    largest = np.finfo(np.float32).max
    old, new = (
        {"w": np.array([largest, 1.0], np.float32)},
        {"w": np.array([-largest, 1 + 2**-20], np.float32)},
    )
    assert moved_towards(old, new, 0.5)["w"].tolist() == [0.0, 1 + 2**-21]
    assert old["w"].tolist() == [largest, 1.0]
    assert new["w"].tolist() == [-largest, 1 + 2**-20]
    assert moved_towards(old, new, 0.0)["w"].tobytes() == old["w"].tobytes()


def test_an_average_of_other_tensors_is_refused() -> None:
    without = {name: tensor for name, tensor in tensors(1).items() if name != "fc"}
    with pytest.raises(MergeError, match="'fc' is missing"):
        moved_towards(tensors(0), without, 0.5)
    with pytest.raises(MergeError, match="'fc' is unknown"):
        moved_towards(without, tensors(0), 0.5)
    with pytest.raises(MergeError, match="'fc' has shape"):
        moved_towards(tensors(0), tensors(1) | {"fc": np.zeros((1, 8), np.float32)}, 0.5)
