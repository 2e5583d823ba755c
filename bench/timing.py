"""Interleaved timing: rivals take turns within each repetition, so a busy machine slows all of them alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

Job = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of one number over the repetitions."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Timings:
    """Seconds per call of each rival, one number per repetition."""

    seconds: Mapping[str, list[float]]

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, base: str) -> Spread:
        """time(name) / time(base), taken within each repetition."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return Spread.of([seconds / base_seconds for seconds, base_seconds in pairs])


def interleaved(
    jobs: Mapping[str, Job], repetitions: int, seconds_each: float, clock: Clock = time.perf_counter
) -> Timings:
    """Times every job once per repetition, in turn, each over as many calls as fill about `seconds_each`.

    `time.process_time` for a clock counts the time of this process alone, of all its threads together.
    """
    calls = {name: _calls_filling(job, seconds_each, clock) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repetitions):
        for name, job in jobs.items():
            seconds[name].append(_seconds(job, calls[name], clock) / calls[name])
    return Timings(seconds)


def load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _calls_filling(job: Job, seconds: float, clock: Clock) -> int:
    calls = 1
    while (taken := _seconds(job, calls, clock)) < seconds / 2:
        calls *= 2
    return max(1, round(calls * seconds / taken))


def _seconds(job: Job, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        job()
    return clock() - start
