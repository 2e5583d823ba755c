"""Interleaved timing, on a clock of the test's own: what a busy machine does to a real one says nothing."""

from __future__ import annotations

from bench.timing import Spread, Timings, interleaved


def test_ratios_are_taken_within_a_repetition() -> None:
    timings = Timings({"slow": [2.0, 8.0, 9.0], "fast": [1.0, 2.0, 3.0]})
    assert timings.ratio("slow", "fast") == Spread(median=3.0, least=2.0, greatest=4.0)
    assert timings.time("slow") == Spread(median=8.0, least=2.0, greatest=9.0)


def test_rivals_take_turns_and_times_are_per_call() -> None:
    now, order = 0.0, []

    def work(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    jobs = {"a": lambda: work("a", 0.25), "b": lambda: work("b", 0.5)}
    timings = interleaved(jobs, repetitions=3, seconds_each=1.0, clock=lambda: now)
    assert order[-18:] == ["a", "a", "a", "a", "b", "b"] * 3
    assert timings == Timings({"a": [0.25] * 3, "b": [0.5] * 3})
