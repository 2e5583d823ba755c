"""Learning rates over the rounds: the formulas written out, and what they leave alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.method.schedule import FLOOR, Schedule, ScheduleKind

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def factors(schedule: Schedule) -> list[float]:
    return [schedule.factor(number) for number in range(1, schedule.rounds + 1)]


def test_constant_is_one_throughout() -> None:
    assert factors(Schedule("constant", 7)) == [1.0] * 7
    assert factors(Schedule()) == [1.0]


def test_cosine_falls_from_one_towards_its_floor() -> None:
    """Four rounds: the cosine of 0, 45, 90 and 135 degrees."""
    half = math.sqrt(0.5)
    expected = [1.0, 0.01 + 0.99 * (1 + half) / 2, 0.01 + 0.99 / 2, 0.01 + 0.99 * (1 - half) / 2]
    assert factors(Schedule("cosine", 4)) == pytest.approx(expected)
    assert factors(Schedule("cosine", 1)) == [1.0]


def test_the_floor_keeps_the_last_of_many_rounds_training() -> None:
    last = factors(Schedule("cosine", 10_000))[-1]
    assert last == pytest.approx(FLOOR, rel=1e-4)
    assert last > FLOOR == 0.01


def test_steps_fall_at_half_and_at_three_quarters() -> None:
    assert factors(Schedule("steps", 8)) == [1.0] * 4 + [0.1] * 2 + [0.01] * 2
    assert factors(Schedule("steps", 2)) == [1.0, 0.1]
    # Five rounds: 0, 20, 40, 60 and 80 % of them have passed.
    assert factors(Schedule("steps", 5)) == [1.0] * 3 + [0.1, 0.01]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_evenly_to_where_the_schedule_begins(kind: ScheduleKind) -> None:
    warm = Schedule(kind, 10, warmup=4)
    assert factors(warm)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    # What follows is the schedule of the rounds that are left.
    assert factors(warm)[4:] == factors(Schedule(kind, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_beyond_the_last_are_as_the_last(kind: ScheduleKind) -> None:
    schedule = Schedule(kind, 9, warmup=2)
    assert schedule.factor(10) == schedule.factor(10**6) == schedule.factor(9)


@given(st.sampled_from(KINDS), st.integers(1, 60), st.data())
def test_rates_rise_in_warm_up_and_never_after(kind: ScheduleKind, rounds: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, rounds - 1))
    found = factors(Schedule(kind, rounds, warmup))
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 1.0
    assert all(min(FLOOR, 1 / (warmup + 1)) <= factor <= 1 for factor in found)


def test_both_rates_are_scaled_and_nothing_else() -> None:
    plan = TrainingPlan(learning_rate=0.4, code_learning_rate=0.2, momentum=0.5, lasso=0.02)
    schedule = Schedule("steps", 4, warmup=1)
    assert schedule.plan(plan, 1) == replace(plan, learning_rate=0.2, code_learning_rate=0.1)
    assert schedule.plan(plan, 2) == plan
    fallen = schedule.plan(plan, 4)
    factor = schedule.factor(4)
    assert factor == 0.1
    assert (fallen.learning_rate, fallen.code_learning_rate) == pytest.approx((0.04, 0.02))
    assert replace(fallen, learning_rate=0.4, code_learning_rate=0.2) == plan
