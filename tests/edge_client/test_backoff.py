"""Pauses between tries."""

from __future__ import annotations

import pytest

from fedmpq.edge_client.backoff import Backoff, BackoffError


def test_pauses_double_up_to_the_most() -> None:
    backoff = Backoff(0.5, 6.0, uniform=lambda: 1.0)
    assert [backoff.pause() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_success_makes_them_short_again() -> None:
    backoff = Backoff(1.0, 60.0, uniform=lambda: 1.0)
    for _ in range(5):
        backoff.pause()
    backoff.reset()
    assert backoff.pause() == 1.0


def test_jitter_is_over_the_whole_interval() -> None:
    draws = iter([0.0, 0.25, 0.999])
    backoff = Backoff(4.0, 4.0, uniform=lambda: next(draws))
    assert [backoff.pause() for _ in range(3)] == [0.0, 1.0, 3.996]
    real = Backoff(1.0, 1.0)
    pauses = [real.pause() for _ in range(500)]
    assert 0 <= min(pauses) < 0.1
    assert 0.9 < max(pauses) < 1
    assert 0.4 < sum(pauses) / len(pauses) < 0.6


def test_years_of_failures_are_no_overflow() -> None:
    backoff = Backoff(1.0, 60.0, uniform=lambda: 1.0)
    assert {backoff.pause() for _ in range(5000)} == {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0}


def test_a_fresh_one_has_no_failures() -> None:
    backoff = Backoff(1.0, 60.0, uniform=lambda: 1.0)
    backoff.pause()
    backoff.pause()
    assert backoff.fresh().pause() == 1.0
    assert backoff.pause() == 4.0


@pytest.mark.parametrize(("least", "most"), [(0, 1), (-1, 1), (2, 1), (1, float("inf")), (float("nan"), 1)])
def test_impossible_pauses(least: float, most: float) -> None:
    with pytest.raises(BackoffError, match="--retry-least"):
        Backoff(least, most)
