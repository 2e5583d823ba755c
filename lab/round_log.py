"""The log of a simulation: what each round came to, one JSON object a line, complete after a crash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fedmpq.lab.experiment import Experiment, ExperimentError
from fedmpq.method.history import TEST_DATA, ClientFacts, RoundFacts
from fedmpq.system.durable_files import append_durably, write_durably

LOG_NAME = "rounds.jsonl"


@dataclass(frozen=True)
class Accuracies:
    """On the test set, by the metric of the run's task: of a classification shares of the samples."""

    accuracy: float
    """Of the full-precision global model `W`."""
    deployed: dict[str, float]
    """By budget: the mean of the integer models its clients run; empty for float methods."""
    mean_deployed: float
    """Mean over all clients of the model their device runs."""
    others: dict[str, float] = field(default_factory=dict)
    """Means over all clients of the other metrics of the task, by name."""


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
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, see `method.history`."""
    parts: tuple[ClientFacts, ...] = ()
    """What each client of the round was dealt and sent."""
    metric: str = "accuracy"
    """By which models are evaluated, see `model.metrics`."""
    virtual_seconds: float | None = None
    """What the round took by the virtual clock of `boards`; None: there is none."""
    virtual_time: float | None = None
    """When it was over by that clock, from the start of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Flat, as a line of the log has it."""
        record = asdict(self)
        return {"round": record.pop("round"), **(record.pop("accuracies") or {}), **record}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RoundResult:
        rest = dict(record)
        names = [each.name for each in fields(Accuracies) if each.name in rest]
        accuracies = Accuracies(**{name: rest.pop(name) for name in names}) if "accuracy" in rest else None
        rest |= {name: tuple(rest[name]) for name in ("clients", "bit_widths")}
        parts = tuple(
            ClientFacts(**{**part, "bit_widths": tuple(part["bit_widths"])}) for part in rest.pop("parts", ())
        )
        return cls(accuracies=accuracies, parts=parts, **rest)

    def facts(self) -> RoundFacts:
        """In the format of every run's history."""
        shares = self.accuracies
        # A log of an earlier version has no more than the clients' numbers.
        known = self.parts or tuple(
            ClientFacts(client, client_name(client), "trained") for client in self.clients
        )
        return RoundFacts(
            round=self.round,
            loss=self.loss,
            accuracy=None if shares is None else shares.accuracy,
            deployed={} if shares is None else shares.deployed,
            mean_deployed=None if shares is None else shares.mean_deployed,
            measured_by="" if shares is None else TEST_DATA,
            metric=self.metric,
            others={} if shares is None else shares.others,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            bit_widths=self.bit_widths,
            seconds=self.seconds,
            phases=self.phases,
            clients=known,
            virtual_time=self.virtual_time,
        )


def client_name(client: int) -> str:
    """A simulated client has no other name."""
    return f"client-{client}"


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


def append_result(folder: Path, result: RoundResult) -> None:
    """One more line, on the disk when this returns."""
    append_durably(folder / LOG_NAME, _log_line("round", result.to_dict()).encode())


def write_log(folder: Path, experiment: Experiment, results: Sequence[RoundResult]) -> None:
    """Takes the place of the old one as a whole: a crash must not cost the rounds before."""
    lines = [
        _log_line("experiment", experiment.to_dict()),
        *(_log_line("round", r.to_dict()) for r in results),
    ]
    write_durably(folder / LOG_NAME, "".join(lines).encode(), private=False)


def _log_line(kind: str, record: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **record}, allow_nan=False) + "\n"
