"""How many times as fast several threads are as one, and whether their cores shared a cache just then.

Samples are some seconds apart, each one thread and several in neighbouring turns, with the distance of two
cores before and after (`bench.core_distance`). Where the two disagree, cores were moved: that does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench import core_distance
from bench.machine import Machine
from bench.timing import Spread
from bench.train_step import Case, native_trainer, paired
from bench.workload import MODELS, make_workload

SAMPLES, PAUSE_SECONDS = 16, 3.0


class Sample(NamedTuple):
    distance: float
    """Nanoseconds of a cache line from one core to the other and back."""
    times_faster: float


@dataclass(frozen=True)
class Scaling:
    model: str
    batch: int
    threads: int
    samples: tuple[Sample, ...]

    def spread(self, near: bool) -> Spread | None:
        """Of the samples in which cores shared a cache, or of those in which they did not."""
        found = [one.times_faster for one in self.samples if core_distance.near(one.distance) == near]
        return Spread.of(found) if found else None

    def lines(self) -> str:
        """In words."""
        said = []
        for near, words in ((True, "shared a cache"), (False, "shared none")):
            spread = self.spread(near)
            chosen = [one.distance for one in self.samples if core_distance.near(one.distance) == near]
            if spread is not None:
                said.append(
                    f"**{spread.median:.2f}** times as fast as one ({spread.least:.2f} to"
                    f" {spread.greatest:.2f}, samples: {len(chosen)}) while the cores {words} (a line there"
                    f" and back in {statistics.median(chosen):.0f} ns)"
                )
        found = ", ".join(said) or "not measured: cores were moved all the time"
        return f"{self.model}, batch {self.batch}: {self.threads} threads are {found}."


def measure(case: Case, samples: int = SAMPLES, pause: float = PAUSE_SECONDS) -> Scaling:
    work = make_workload(case.model, case.batch)
    trainers = {"one": native_trainer(work, case, 1), "many": native_trainer(work, case)}
    found = []
    for _ in range(samples):
        before = core_distance.nanoseconds()
        ratio = paired(trainers, 1).ratio("one", "many").median
        after = core_distance.nanoseconds()
        if core_distance.near(before) == core_distance.near(after):
            found.append(Sample((before + after) / 2, ratio))
        time.sleep(pause)
    return Scaling(case.model, case.batch, case.threads, tuple(found))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet20", help="default %(default)s")
    parser.add_argument("--batch", type=int, default=64, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=Machine.here().cores, help="default: one a core")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="default %(default)s")
    arguments = parser.parse_args(given)
    if arguments.threads < 2:
        parser.error(f"--threads {arguments.threads} compares nothing with one thread; the least is 2")
    case = Case(arguments.model, arguments.batch, threads=arguments.threads)
    print(measure(case, arguments.samples).lines())


if __name__ == "__main__":
    main()
