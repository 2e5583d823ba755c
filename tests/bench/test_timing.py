import time

import pytest

from bench.timing import Spread, Timings, interleaved


def test_ratios_are_taken_within_a_repetition() -> None:
    timings = Timings({"slow": [2.0, 8.0, 9.0], "fast": [1.0, 2.0, 3.0]})
    assert timings.ratio("slow", "fast") == Spread(median=3.0, least=2.0, greatest=4.0)
    assert timings.time("slow") == Spread(median=8.0, least=2.0, greatest=9.0)


def test_rivals_take_turns_and_times_are_per_call() -> None:
    order: list[str] = []

    def sleeper(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    jobs = {"a": lambda: sleeper("a", 0.004), "b": lambda: sleeper("b", 0.008)}
    timings = interleaved(jobs, repetitions=3, seconds_each=0.004)
    assert order[-6:] == ["a", "b"] * 3
    assert min(timings.seconds["a"]) >= 0.004
    assert timings.time("b").least == pytest.approx(0.008, rel=1)
