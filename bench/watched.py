"""What an open dashboard costs: rounds of two clients that train nothing, with and without an onlooker.

`fedmpq server --dashboard` and `fedmpq server` take turns, each from a fresh start; the onlooker takes every
event of the page all the time. No-op rounds are the worst case: those of real boards take minutes, and a
look is never more than one part in a hundred of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import loopback
from bench.machine import Machine, warn_if_busy
from bench.timing import Timings, load_average
from bench.workload import BUDGET, IMAGE, MODELS

ALONE, WATCHED = "alone", "watched"


def measure(model: str, rounds: int, repetitions: int) -> dict[str, Any]:
    """Medians of each turn's rounds, and their ratios between neighbouring turns."""
    channels, height, width = MODELS.get(model, IMAGE)
    before = load_average()
    seconds: dict[str, list[float]] = {ALONE: [], WATCHED: []}
    with TemporaryDirectory(prefix="fedmpq-bench-") as scratch:
        for turn in range(repetitions):
            # Each is first in every other turn.
            for name in (ALONE, WATCHED) if turn % 2 == 0 else (WATCHED, ALONE):
                folder, image = Path(scratch) / f"{turn}-{name}", (height, width, channels)
                found = loopback.run(model, image, BUDGET, rounds, folder, watched=name == WATCHED)
                seconds[name].append(statistics.mean(found.seconds))
    timings = Timings(seconds)
    return {
        "model": model,
        "rounds": rounds,
        "repetitions": repetitions,
        "seconds_per_round": timings.time(ALONE).as_dict(),
        "watched_seconds_per_round": timings.time(WATCHED).as_dict(),
        "watched_per_alone": timings.ratio(WATCHED, ALONE).as_dict(),
        "load_average_before": before,
        "load_average_after": load_average(),
    }


def table(facts: dict[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"{'':24}{'median':>9}{'least':>9}{'greatest':>9}"]
    for title, key in (
        ("seconds a round", "seconds_per_round"),
        ("with the page open", "watched_seconds_per_round"),
        ("the second / the first", "watched_per_alone"),
    ):
        lines.append(
            f"{title:24}" + "".join(f"{facts[key][w]:9.4f}" for w in ("median", "least", "greatest"))
        )
    lines.append(f"load average before {facts['load_average_before']}, after {facts['load_average_after']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.watched", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet20", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="of each turn (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    for name in ("rounds", "repetitions"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} is too few; the least is 1")
    warn_if_busy()
    found = measure(arguments.model, arguments.rounds, arguments.repetitions)
    facts = {"bench": "watched", **Machine.here().as_dict(), **found}
    print(json.dumps(facts) if arguments.json else table(facts))


if __name__ == "__main__":
    main()
