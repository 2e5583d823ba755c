"""Boards that differ in speed: rounds of selected boards against asynchronous rounds, by the virtual clock.

Twenty boards, of which the slowest takes up to ten times as long as the fastest, train digits. Every way of
running them gets the same virtual time. What is told is when the integer models that boards run first
reached an accuracy, and what they had reached at a given time, of three seeds. Learning rates stay constant,
so that a longer run begins as a shorter one does. All numbers are of the virtual clock: every machine gives
the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.memory import ROOT
from bench.pages import with_generated
from fedmpq.lab import simulation
from fedmpq.lab.experiment import make_experiment
from fedmpq.lab.round_log import RoundResult

PAGE = ROOT / "docs" / "simulation.md"
BEGIN, END = "<!-- asynchronous: begin -->", "<!-- asynchronous: end -->"
SEEDS = (0, 1, 2)
TARGETS = (0.8, 0.9)
"""Mean accuracies of what boards run."""
TIMES = (50,)
"""Virtual seconds at which accuracies are told."""
EVERYBODY: dict[str, Any] = {
    "data": "digits",
    "model": "digits_cnn",
    "budgets": [2, 4, 4, 8] * 5,
    "batch_size": 16,
    "epochs": 1,
    "schedule": "constant",
    "boards": {"seconds_per_sample": 0.01, "latency": 0.05, "up": 1e6, "down": 1e6, "spread": 10},
}


@dataclass(frozen=True)
class Way:
    """One way of running the boards."""

    title: str
    settings: Mapping[str, Any]
    rounds: int
    """So many reach the targets, or `TIMES` at least."""
    evaluate_every: int = 1


WAYS = (
    Way("rounds of all 20", {"participation": 1.0, "aggregation": "mean"}, 36, 2),
    Way("rounds of 5", {"participation": 0.25, "aggregation": "mean"}, 44, 2),
    Way("asynchronous, merges of 5", {"participation": 1.0, "asynchronous": 5}, 216, 8),
)
"""All merge by a plain mean."""


@dataclass(frozen=True)
class Run:
    """One way with one seed: virtual seconds and the mean accuracy of what boards run, as evaluated."""

    points: Sequence[tuple[float, float]]
    merges: int
    mean_staleness: float

    @classmethod
    def of(cls, results: Sequence[RoundResult]) -> Run:
        points = [
            (result.virtual_time or 0.0, result.accuracies.mean_deployed)
            for result in results
            if result.accuracies is not None
        ]
        stale = [part.staleness for result in results for part in result.parts]
        return cls(points, len(results), statistics.fmean(stale))

    def reached(self, accuracy: float) -> float | None:
        """When it first had that accuracy; None: not by its end."""
        return next((time for time, share in self.points if share >= accuracy), None)

    def after(self, time: float) -> float:
        """The accuracy of the last evaluation up to then."""
        return [share for at, share in self.points if at <= time][-1]

    @property
    def per_merge(self) -> float:
        return self.points[-1][0] / self.merges


def measure(way: Way, seed: int, workers: int | None = None, **changes: Any) -> Run:
    settings = {**EVERYBODY, "rounds": way.rounds, "evaluate_every": way.evaluate_every}
    experiment = make_experiment({**settings, **way.settings, "seed": seed, **changes})
    with TemporaryDirectory(prefix="fedmpq-bench-") as folder:
        prepared = simulation.prepare(experiment)
        return Run.of(simulation.run(prepared, Path(folder), workers, lambda _: None))


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    """Medians of the seeds, least and greatest in brackets."""
    heads = ["", "seconds a merge", "staleness"]
    heads += [f"seconds to {100 * target:g} %" for target in TARGETS]
    heads += [f"accuracy after {time} s" for time in TIMES]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for title, seeds in runs.items():
        cells = [title, _spread([run.per_merge for run in seeds], "{:.1f}")]
        cells.append(_spread([run.mean_staleness for run in seeds], "{:.1f}"))
        cells += [_reached(seeds, target) for target in TARGETS]
        cells += [_spread([100 * run.after(time) for run in seeds], "{:.1f}") for time in TIMES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _reached(seeds: Sequence[Run], target: float) -> str:
    found = [run.reached(target) for run in seeds]
    known = [time for time in found if time is not None]
    if len(known) < len(found):
        return (
            f"not by {min(run.points[-1][0] for run in seeds):.0f} s, {len(known)} of {len(found)} seeds did"
        )
    return _spread(known, "{:.0f}")


def _spread(values: Sequence[float], form: str) -> str:
    median, least, most = (form.format(f(values)) for f in (statistics.median, min, max))
    return median if least == most else f"{median} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--workers", type=int, help="clients at a time (default: one a core)")
    arguments = parser.parse_args()
    runs: dict[str, list[Run]] = {}
    for way in WAYS:
        for seed in SEEDS:
            run = measure(way, seed, arguments.workers)
            runs.setdefault(way.title, []).append(run)
            print(json.dumps({"way": way.title, "seed": seed, "points": run.points}), flush=True)
    made = table(runs)
    print(made)
    if arguments.page:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_generated(page, made, BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
