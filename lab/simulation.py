"""The simulator: rounds of a federated method, clients in parallel processes, a checkpoint after every round.

Everything random is drawn by counter from the seed, and updates are merged in the order of their clients, so
one seed gives one result to the bit whatever the number of workers, and a resumed run ends where an unbroken
one does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_named
from fedmpq.lab.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError
from fedmpq.lab.initial import make_graph
from fedmpq.lab.methods import Method, Probe, make_method
from fedmpq.lab.partition import dirichlet_partition
from fedmpq.lab.workers import WorkerPool
from fedmpq.method.quantized_method import select_clients
from fedmpq.method.recipe import QUANTIZED_METHODS
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import MIN_SAMPLES

LOG_NAME = "rounds.jsonl"


@dataclass(frozen=True)
class Accuracies:
    """Shares of the test set."""

    accuracy: float
    """Of the full-precision global model `W`."""
    deployed: dict[str, float]
    """By budget: the mean accuracy of the integer models its clients run; empty for float methods."""
    mean_deployed: float
    """Mean over all clients of the accuracy of the model their device runs."""


@dataclass(frozen=True)
class RoundResult:
    """What is reported after every round."""

    round: int
    accuracies: Accuracies | None
    """None in a round whose model was not evaluated."""
    loss: float
    bytes_up: int
    bytes_down: int
    clients: tuple[int, ...]
    bit_widths: tuple[int, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Flat, as a line of the log has it."""
        record = asdict(self)
        return {"round": record.pop("round"), **(record.pop("accuracies") or {}), **record}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RoundResult:
        rest = dict(record)
        names = [field.name for field in fields(Accuracies)]
        accuracies = Accuracies(**{name: rest.pop(name) for name in names}) if "accuracy" in rest else None
        rest |= {name: tuple(rest[name]) for name in ("clients", "bit_widths")}
        return cls(accuracies=accuracies, **rest)


@dataclass(frozen=True)
class Progress:
    """Heard by whoever watches: how far a round is, and its result when it is over."""

    round: int
    rounds: int
    done: int
    selected: int
    result: RoundResult | None = None


Listener = Callable[[Progress], None]


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded, its clients' shares dealt and its model traced."""

    experiment: Experiment
    train: Dataset
    test: Dataset
    parts: tuple[NDArray[np.int64], ...]
    start: Checkpoint


def prepare(experiment: Experiment) -> Prepared:
    """Load and divide the data, trace the model, make the clients."""
    train, test, parts = _data(experiment)
    graph = make_graph(experiment, train)
    clients = [
        ClientRecord(n, budget, len(part))
        for n, (budget, part) in enumerate(zip(experiment.budgets, parts, strict=True))
    ]
    model = make_method(experiment, graph, len(train.class_names)).start(clients)
    return Prepared(experiment, train, test, parts, Checkpoint(experiment, graph, model, train.class_names))


def reopen(folder: Path, rounds: int | None = None) -> Prepared:
    """A run as its last checkpoint left it, perhaps to go on for more rounds than first asked for."""
    checkpoint = load_checkpoint(folder)
    if rounds is not None:
        if rounds < checkpoint.model.round:
            raise ExperimentError(
                f"{folder} has done {checkpoint.model.round} rounds; rounds = {rounds} is fewer"
            )
        checkpoint = replace(checkpoint, experiment=replace(checkpoint.experiment, rounds=rounds))
    train, test, parts = _data(checkpoint.experiment)
    image, samples = checkpoint.graph.input, tuple(client.samples for client in checkpoint.model.clients)
    if (
        train.image_shape != (image.height, image.width, image.channels)
        or train.class_names != checkpoint.class_names
        or tuple(len(part) for part in parts) != samples
    ):
        raise ExperimentError(
            f"the data at {checkpoint.experiment.data} is not what {folder} was started with"
        )
    return Prepared(checkpoint.experiment, train, test, parts, checkpoint)


def run(prepared: Prepared, folder: Path, workers: int, listener: Listener) -> list[RoundResult]:
    """All rounds that are left; results go to the folder's log, one JSON object a line."""
    experiment, checkpoint = prepared.experiment, prepared.start
    folder.mkdir(parents=True, exist_ok=True)
    results = logged_results(folder, checkpoint.model.round)
    save_checkpoint(folder, checkpoint)
    _write_log(folder, experiment, results)
    method = make_method(experiment, checkpoint.graph, len(checkpoint.class_names))
    with WorkerPool(
        experiment, checkpoint.graph, prepared.train, prepared.test, prepared.parts, workers
    ) as pool:
        model = checkpoint.model
        while model.round < experiment.rounds:
            model, result = _round(method, model, experiment, pool, listener)
            # The log first: a result without its checkpoint is cut off on resuming; the reverse is lost.
            _append(folder / LOG_NAME, _log_line("round", result.to_dict()))
            save_checkpoint(folder, replace(checkpoint, model=model))
            results.append(result)
            listener(
                Progress(model.round, experiment.rounds, len(result.clients), len(result.clients), result)
            )
    return results


def read_log(folder: Path) -> list[RoundResult]:
    """The results a run has logged, in order of rounds."""
    path = folder / LOG_NAME
    results: dict[int, RoundResult] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut off by a crash; its round is not in the checkpoint and runs again
        try:
            if record.pop("type") == "round":
                result = RoundResult.from_dict(record)
                results[result.round] = result
        except (AttributeError, LookupError, TypeError):
            raise ExperimentError(f"{path}, line {number}: not a line of this version's log") from None
    return [results[number] for number in sorted(results)]


def logged_results(folder: Path, rounds_done: int) -> list[RoundResult]:
    """The results of exactly the rounds that the checkpoint has."""
    if rounds_done == 0:
        return []
    if not (folder / LOG_NAME).is_file():
        raise ExperimentError(
            f"{folder} has a checkpoint of round {rounds_done} but no {LOG_NAME}; bring it back"
        )
    kept = [result for result in read_log(folder) if result.round <= rounds_done]
    if missing := sorted(set(range(1, rounds_done + 1)) - {result.round for result in kept}):
        raise ExperimentError(
            f"{folder / LOG_NAME} lacks round {missing[0]}, which the checkpoint has; bring it back"
        )
    return kept


def load_data(experiment: Experiment) -> tuple[Dataset, Dataset]:
    """The images an experiment trains on, and those it is tested on."""
    return load_named(
        experiment.data,
        train_limit=experiment.train_limit,
        test_limit=experiment.test_limit,
        size=experiment.size,
    )


def _data(experiment: Experiment) -> tuple[Dataset, Dataset, tuple[NDArray[np.int64], ...]]:
    train, test = load_data(experiment)
    parts = dirichlet_partition(
        train.labels, experiment.clients, experiment.alpha, experiment.seed, min_per_client=MIN_SAMPLES
    )
    return train, test, tuple(parts)


def _round(
    method: Method, model: GlobalModel, experiment: Experiment, pool: WorkerPool, listener: Listener
) -> tuple[GlobalModel, RoundResult]:
    started = time.monotonic()
    number = model.round + 1
    selected = select_clients(model.clients, experiment.seed, number, experiment.clients_per_round)
    assignments = [method.assign(model, client) for client in selected]
    updates = []
    listener(Progress(number, experiment.rounds, 0, len(selected)))
    for update in pool.train(assignments):
        updates.append(update)
        listener(Progress(number, experiment.rounds, len(updates), len(selected)))
    # They come as they are ready; a sum in that order would differ in its last bits from run to run.
    updates.sort(key=lambda update: update.client)
    merged = method.merge(model, updates)
    evaluates = experiment.evaluates(number)
    measured = Measured(merged)
    if evaluates and method.calibrates:
        # Those of the round are at hand; what the run ends with, everybody measures.
        measured = _calibrate(
            method, merged, pool, merged.clients if number >= experiment.rounds else selected
        )
    merged = measured.model
    samples = {client.client: client.samples for client in model.clients}
    return merged, RoundResult(
        round=number,
        accuracies=_evaluate(method, merged, experiment, pool) if evaluates else None,
        loss=float(np.average([u.loss for u in updates], weights=[samples[u.client] for u in updates])),
        bytes_up=sum(update.nbytes for update in updates) + measured.bytes_up,
        bytes_down=sum(assignment.nbytes for assignment in assignments) + measured.bytes_down,
        clients=tuple(client.client for client in selected),
        bit_widths=merged.bit_widths,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Measured:
    """A calibration: the model with its statistics, and what it cost."""

    model: GlobalModel
    bytes_up: int = 0
    bytes_down: int = 0


def _calibrate(
    method: Method, model: GlobalModel, pool: WorkerPool, clients: Sequence[ClientRecord]
) -> Measured:
    """These clients measure the statistics of what they would run."""
    assignments = [method.calibration(model, client) for client in clients]
    found = pool.calibrate(assignments)
    return Measured(
        method.calibrated(model, found),
        bytes_up=sum(one.nbytes for one in found),
        bytes_down=sum(assignment.nbytes for assignment in assignments),
    )


def _evaluate(method: Method, model: GlobalModel, experiment: Experiment, pool: WorkerPool) -> Accuracies:
    probes = method.probes(model)
    shares = pool.accuracies(probes)
    deployed, mean = _deployed(probes, shares, model.clients)
    return Accuracies(shares[0], deployed if experiment.method in QUANTIZED_METHODS else {}, mean)


def _deployed(
    probes: Sequence[Probe], accuracies: Sequence[float], clients: Sequence[ClientRecord]
) -> tuple[dict[str, float], float]:
    """Accuracy by budget and over all clients; each client counts for the model it runs, perhaps `W`."""
    of_client = {client.client: accuracies[0] for client in clients}
    for probe, accuracy in zip(probes, accuracies, strict=True):
        of_client |= dict.fromkeys(probe.clients, accuracy)
    budgets = sorted({client.budget for client in clients})
    by_budget = {
        f"{budget:g}": float(np.mean([of_client[c.client] for c in clients if c.budget == budget]))
        for budget in budgets
    }
    return by_budget, float(np.mean(list(of_client.values())))


def _write_log(folder: Path, experiment: Experiment, results: Sequence[RoundResult]) -> None:
    """Beside the old one, then renamed: a crash must not cost the rounds before."""
    partial = folder / f".{LOG_NAME}.partial"
    partial.unlink(missing_ok=True)
    lines = [
        _log_line("experiment", experiment.to_dict()),
        *(_log_line("round", r.to_dict()) for r in results),
    ]
    _append(partial, "".join(lines))
    partial.replace(folder / LOG_NAME)


def _log_line(kind: str, record: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **record}, allow_nan=False) + "\n"


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
