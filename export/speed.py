"""How fast models run, taking turns so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Job = Callable[[], object]


def latencies(jobs: Mapping[str, Job], seconds: float) -> dict[str, list[float]]:
    """Seconds of each run of every job, for about `seconds` in all; each runs once before to warm up."""
    for job in jobs.values():
        job()
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 3:
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            taken[name].append(time.perf_counter() - start)
    return taken


def speed_up(taken: Mapping[str, list[float]], name: str, base: str) -> float:
    """The median over neighbouring runs of the time of `base` over the time of `name`."""
    pairs = zip(taken[base], taken[name], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs)
