"""Client-epochs a second of this project's simulation, beside Flower's on Ray and pfl-research.

Everybody trains the same network on the same images, in the same batches of every client in every round,
with as many workers: the rivals in fp32 with torch (channels_last, one thread a worker), FedMPQ at 4 bits per
weight. They take turns, each from a fresh start; start-up and the first round do not count, and nothing is
evaluated. A speed-up is taken between neighbouring turns.

Beside the seconds of a round there is the processor time of all processes that take part in it, which other
work on the machine disturbs less. Where all workers are busy all the time, the two have the same ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, process_time
from typing import Any
from uuid import uuid4

import numpy as np

from bench.machine import Machine, warn_if_busy
from bench.memory import ROOT
from bench.pages import measured_on, with_generated
from bench.process_facts import marked_cpu_seconds
from bench.rounds import Moment, between
from bench.simulation_rivals import MARK, Rival, RivalError, rivals
from bench.timing import Spread, Timings, load_average
from bench.workload import BUDGET, CLASSES, INPUT_SCALE, INPUT_ZERO_POINT, LEARNING_RATE
from fedmpq.data.dataset import Dataset
from fedmpq.lab import simulation
from fedmpq.lab.experiment import make_experiment
from fedmpq.lab.pool import PROCESSES, RAY
from fedmpq.lab.simulation import Progress

PAGE = ROOT / "docs" / "simulation.md"
BEGIN, END = "<!-- simulation: begin -->", "<!-- simulation: end -->"
IMAGES = {"digits_cnn": (8, 8, 1), "resnet20": (32, 32, 3)}
"""Height, width and channels."""
OURS, OURS_ON_RAY = "fedmpq", "fedmpq_on_ray"
TITLES = {OURS: "FedMPQ", OURS_ON_RAY: "FedMPQ on Ray", "flwr": "Flower on Ray", "pfl": "pfl-research"}


@dataclass(frozen=True)
class Case:
    """What to measure."""

    model: str = "resnet20"
    clients: int = 10
    samples: int = 256
    """Of each client."""
    batch: int = 16
    epochs: int = 1
    rounds: int = 3
    """Measured in each turn."""
    repetitions: int = 3
    workers: int = 2


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: Mapping[str, list[float]]
    """Of a round, by simulator; one number for each turn."""
    cpu_seconds: Mapping[str, list[float]]
    """Of all processes in a round, likewise."""
    missing: Mapping[str, str]
    """Why a rival was not measured."""
    load_before: list[float]
    load_after: list[float]

    def as_dict(self) -> dict[str, Any]:
        epochs = self.case.clients * self.case.epochs
        timings, cpu = Timings(self.seconds), Timings(self.cpu_seconds)
        rates = {name: Spread.of([epochs / each for each in turns]) for name, turns in self.seconds.items()}
        speedups = {name: timings.ratio(name, OURS) for name in self.seconds if name != OURS}
        costs = {
            name: Spread.of([each / epochs for each in turns]) for name, turns in self.cpu_seconds.items()
        }
        savings = {name: cpu.ratio(name, OURS) for name in self.cpu_seconds if name != OURS}
        return {
            **asdict(self.case),
            "client_epochs_per_second": {name: round(rate.median, 2) for name, rate in rates.items()},
            "speedup_vs": {name: round(spread.median, 2) for name, spread in speedups.items()},
            "spreads": {name: rate.as_dict() for name, rate in rates.items()},
            "speedup_spreads": {name: spread.as_dict() for name, spread in speedups.items()},
            "cpu_seconds_per_client_epoch": {name: cost.as_dict() for name, cost in costs.items()},
            "cpu_ratios": {name: spread.as_dict() for name, spread in savings.items()},
            "missing": dict(self.missing),
            "load_average_before": self.load_before,
            "load_average_after": self.load_after,
        }


def measure(case: Case, with_ray: bool = True, with_rivals: bool = True) -> Result:
    """Every simulator's turns, one after the other in each repetition."""
    before = load_average()
    train = images(case)
    ready, missing = _ready(case) if with_rivals else ({}, {})
    turns: dict[str, list[Moment]] = {OURS: []}
    for _ in range(case.repetitions):
        turns[OURS].append(own_round(case, train, PROCESSES))
        if with_ray:
            turns.setdefault(OURS_ON_RAY, []).append(own_round(case, train, RAY))
        for name, rival in ready.items():
            turns.setdefault(name, []).append(their_round(rival, case, train))
    seconds = {name: [each.seconds for each in found] for name, found in turns.items()}
    cpu = {name: [each.cpu_seconds for each in found] for name, found in turns.items()}
    return Result(case, seconds, cpu, missing, before, load_average())


def _ready(case: Case) -> tuple[dict[str, Rival], dict[str, str]]:
    ready, missing = {}, {}
    for name, rival in rivals(case.workers).items():
        try:
            rival.installed()
            ready[name] = rival
        except RivalError as error:
            missing[name] = str(error)
            print(f"measured without {rival.title}: {error}", file=sys.stderr)
    return ready, missing


def images(case: Case) -> Dataset:
    """Random images with random labels: what they show does not matter to time."""
    random = np.random.default_rng(0)
    count = case.clients * case.samples
    pixels = random.integers(0, 256, (count, *IMAGES[case.model]), dtype=np.uint8)
    names = tuple(str(label) for label in range(CLASSES))
    return Dataset(pixels, np.arange(count) % CLASSES, names)


def a_round(moments: Sequence[Moment]) -> Moment:
    """What one round takes, the median over a turn."""
    return Moment(
        statistics.median(between([each.seconds for each in moments])),
        statistics.median(between([each.cpu_seconds for each in moments])),
    )


def own_round(case: Case, train: Dataset, on: str) -> Moment:
    """What this project's round takes."""
    experiment = make_experiment(
        {
            "data": "random",
            "model": case.model,
            "budgets": [BUDGET] * case.clients,
            "participation": 1.0,
            "alpha": float("inf"),
            # The first is not measured, and the last is evaluated.
            "rounds": case.rounds + 2,
            "evaluate_every": case.rounds + 2,
            "epochs": case.epochs,
            "batch_size": case.batch,
            "code_learning_rate": LEARNING_RATE,
            # A plain mean, as the rivals take it.
            "aggregation": "mean",
        }
    )
    moments: list[Moment] = []
    # What this process starts has it in its environment.
    os.environ[MARK] = mark = uuid4().hex

    def hear(progress: Progress) -> None:
        if progress.result is not None:
            moments.append(Moment(monotonic(), process_time() + marked_cpu_seconds(f"{MARK}={mark}")))

    prepared = simulation.prepare_with(experiment, train, train.subset(np.arange(CLASSES)))
    with TemporaryDirectory(prefix="fedmpq-bench-") as folder:
        simulation.run(prepared, Path(folder), case.workers, hear, on)
    return a_round(moments[:-1])


def their_round(rival: Rival, case: Case, train: Dataset) -> Moment:
    """The same of a rival's."""
    work = {
        "model": case.model,
        "classes": CLASSES,
        "clients": case.clients,
        "rounds": case.rounds + 1,
        "workers": case.workers,
        "epochs": case.epochs,
        "batch": case.batch,
        "learning_rate": LEARNING_RATE,
    }
    values = (train.images.astype(np.float32) - INPUT_ZERO_POINT) * np.float32(INPUT_SCALE)
    with TemporaryDirectory(prefix="fedmpq-bench-") as name:
        folder = Path(name)
        np.save(folder / "images.npy", values.transpose(0, 3, 1, 2))
        np.save(folder / "labels.npy", train.labels)
        return a_round(rival.moments(work, folder))


def table(facts: Mapping[str, Any]) -> str:
    """What `as_dict` says, as a table of Markdown."""
    lines = [
        "| | client-epochs a second | FedMPQ is faster by | processor ms of each | FedMPQ takes less by |",
        "|---|---|---|---|---|",
    ]
    for name, spread in facts["spreads"].items():
        cost = {key: 1000 * value for key, value in facts["cpu_seconds_per_client_epoch"][name].items()}
        cells = [f"{spread['median']:.1f} ({_range(spread)})", _times(facts["speedup_spreads"].get(name))]
        cells += [f"{cost['median']:,.0f} ({_range(cost, 0)})", _times(facts["cpu_ratios"].get(name))]
        lines.append(f"| {_title(name)} | {' | '.join(cells)} |")
    lines += [f"| {_title(name)} | not measured: {why} | | | |" for name, why in facts["missing"].items()]
    return "\n".join(lines)


def _times(ratio: Mapping[str, float] | None) -> str:
    return f"**{ratio['median']:.1f}** ({_range(ratio)})" if ratio else ""


def _range(spread: Mapping[str, float], digits: int = 1) -> str:
    return f"{spread['least']:,.{digits}f} to {spread['greatest']:,.{digits}f}"


def _title(name: str) -> str:
    versions = {key: rival.version for key, rival in rivals(1).items()}
    return f"{TITLES[name]} {versions[name]}" if name in versions else TITLES[name]


def words(facts: Mapping[str, Any]) -> str:
    """What was measured, in a sentence."""
    return (
        f"{facts['model']}, {facts['clients']} clients of {facts['samples']} images, all in every round, "
        f"batches of {facts['batch']}, local epochs: {facts['epochs']}; {facts['workers']} workers. Turns of "
        f"each: {facts['repetitions']}, of {facts['rounds']} rounds; medians, least and greatest. Load "
        f"average before {facts['load_average_before'][0]}, after {facts['load_average_after'][0]}."
    )


def write_page(all_facts: list[dict[str, Any]]) -> None:
    parts = [measured_on(Machine.here())]
    for facts in all_facts:
        parts += [words(facts), table(facts)]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_generated(page, "\n\n".join(parts), BEGIN, END), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--model", choices=IMAGES, action="append", help="default: each, one after the other")
    kinds: dict[str, Callable[[str], int]] = dict.fromkeys(
        ("clients", "samples", "batch", "epochs", "rounds", "repetitions", "workers"), int
    )
    for name, kind in kinds.items():
        default = getattr(Case, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help="default %(default)s")
    parser.add_argument("--no-ray", action="store_true", help="leave out FedMPQ on Ray")
    parser.add_argument("--no-rivals", action="store_true", help="measure FedMPQ alone")
    parser.add_argument("--page", action="store_true", help="write docs/simulation.md")
    parser.add_argument("--json", action="store_true", help="print one JSON object a model and nothing else")
    return parser


def main() -> None:
    parser = _parser()
    given = vars(parser.parse_args())
    models, flags = given.pop("model") or list(IMAGES), {key: given.pop(key) for key in ("json", "page")}
    without = {key: given.pop(key) for key in ("no_ray", "no_rivals")}
    for name, value in given.items():
        if value < 1:
            parser.error(f"--{name} {value} is too few; the least is 1")
    warn_if_busy()
    found = []
    for model in models:
        result = measure(Case(model=model, **given), not without["no_ray"], not without["no_rivals"])
        facts = {"bench": "simulation", **Machine.here().as_dict(), **result.as_dict()}
        found.append(facts)
        print(json.dumps(facts) if flags["json"] else f"{words(facts)}\n\n{table(facts)}\n", flush=True)
    if flags["page"]:
        write_page(found)


if __name__ == "__main__":
    main()
