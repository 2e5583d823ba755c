"""The deal of images to clients: complete, repeatable, and skewed as much as asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq.lab.partition import class_histogram, dirichlet_partition

label_arrays = hnp.arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 6))
alphas = st.sampled_from([1e-3, 0.1, 0.5, 1.0, 100.0, 1e6, math.inf])


@given(label_arrays, st.integers(1, 12), alphas, st.integers(0, 2**64), st.integers(0, 3))
def test_every_index_once_and_none_left_short(
    labels: NDArray[np.int64], clients: int, alpha: float, seed: int, least: int
) -> None:
    assume(len(labels) >= clients * least)
    try:
        parts = dirichlet_partition(labels, clients, alpha, seed, least)
    except ValueError as error:
        # The even split, and a floor of 0, never run out of draws.
        if alpha == math.inf or least == 0 or "no draw of 1000" not in str(error):
            raise
        return
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= least
        assert np.all(np.diff(part) > 0)
    again = dirichlet_partition(labels, clients, alpha, seed, least)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given(label_arrays, st.integers(1, 12), st.integers(0, 2**32))
def test_infinite_alpha_is_even(labels: NDArray[np.int64], clients: int, seed: int) -> None:
    counts = class_histogram(labels, dirichlet_partition(labels, clients, math.inf, seed, 0), 7)
    assert np.array_equal(counts.sum(axis=0), np.bincount(labels, minlength=7))
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1


def test_large_alpha_is_nearly_even() -> None:
    labels = np.repeat(np.arange(4), 1000)
    counts = class_histogram(labels, dirichlet_partition(labels, 5, 1e6, 0), 4)
    assert np.abs(counts - 200).max() <= 2


def test_shares_have_the_variance_of_a_dirichlet() -> None:
    """Var of one share is (1/K)(1 - 1/K) / (K alpha + 1); the even split's is 0."""
    labels, clients = np.repeat(np.arange(200), 200), 5
    for alpha in (0.1, 0.5, 1.0):
        shares = class_histogram(labels, dirichlet_partition(labels, clients, alpha, 3), 200) / 200
        expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        assert shares.var() == pytest.approx(expected, rel=0.15)


def test_seeds_differ_and_images_within_a_class_are_shuffled() -> None:
    labels = np.zeros(1000, np.int64)
    one, other = (dirichlet_partition(labels, 2, 100.0, seed) for seed in (0, 1))
    assert not np.array_equal(one[0], other[0])
    assert one[0].max() > 900
    assert one[1].min() < 100


def test_the_paper_setting_leaves_no_client_empty() -> None:
    labels = np.repeat(np.arange(10), 500)
    for seed in range(20):
        parts = dirichlet_partition(labels, 10, 0.1, seed, min_per_client=10)
        assert min(map(len, parts)) >= 10


def test_histogram_counts() -> None:
    labels = np.array([0, 2, 2, 1])
    assert class_histogram(labels, [np.array([0, 1]), np.array([2, 3])], 4).tolist() == [
        [1, 0, 1, 0],
        [0, 1, 1, 0],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.5, 0), "0 clients"),
        ((2, 0.0, 0), "alpha is 0"),
        ((2, -1.0, 0), "alpha is -1"),
        ((2, math.nan, 0), "alpha is nan"),
        ((2, 1e7, 0), "inf for an even split"),
        ((5, 0.5, 0), "fewer clients"),
        ((2, 0.5, 0, 3), "smaller min_per_client"),
        ((2, 0.5, 0, -1), "at least -1"),
        ((4, 1e-3, 0), "no draw of 1000"),
    ],
)
def test_impossible_deals_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dirichlet_partition(np.zeros(4, np.int64), *arguments)
