"""Where people already look: the rounds of a run as TensorBoard's event files, or in MLflow.

A target is written `tensorboard:FOLDER` or `mlflow:URI`. Every number of a round (`RoundFacts.row`) becomes a
scalar at the step of its round. What is there already is not written again, so a tracker that was stopped
goes on where it was. `fedmpq[tracking]` has both packages; neither is loaded before it is wanted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from fedmpq.method.history import RoundFacts
from fedmpq.system.durable_files import write_durably

KINDS = ("tensorboard", "mlflow")
_NOTE = "fedmpq-tracked.json"


class TrackingError(ValueError):
    """A target that cannot be written to."""


class Tracker(Protocol):
    """Takes the rounds of one run, each once."""

    @property
    def last(self) -> int:
        """The last round that it has; 0 before the first."""
        ...

    def add(self, facts: RoundFacts) -> None: ...

    def close(self) -> None: ...


def open_tracker(target: str, run: str) -> Tracker:
    """The tracker for the run of that name."""
    kind, colon, place = target.partition(":")
    if kind not in KINDS or not colon or not place:
        raise TrackingError(f"{target!r} is no place to track to: write tensorboard:FOLDER or mlflow:URI")
    return _TensorBoard(Path(place), run) if kind == "tensorboard" else _MLflow(place, run)


def scalars(facts: RoundFacts) -> dict[str, float]:
    """The numbers of a round that were measured, by the names that `fedmpq history` gives them."""
    row = facts.row()
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    if facts.bit_widths:
        numbers["mean_bits"] = sum(facts.bit_widths) / len(facts.bit_widths)
    return {name: float(value) for name, value in numbers.items() if name != "round"}


class _TensorBoard:
    """Event files in FOLDER/RUN, and beside them a note of the last round."""

    def __init__(self, folder: Path, run: str) -> None:
        from tensorboardX import SummaryWriter

        self._note = folder / run / _NOTE
        self.last = _noted(self._note)
        # Files are named by the second; two that begin within one would be the same.
        self._writer = SummaryWriter(str(folder / run), filename_suffix=f".from-round-{self.last + 1}")

    def add(self, facts: RoundFacts) -> None:
        for name, value in scalars(facts).items():
            self._writer.add_scalar(name, value, facts.round)
        self._writer.flush()
        write_durably(self._note, json.dumps({"round": facts.round}).encode(), private=False)
        self.last = facts.round

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    """A run of the experiment "fedmpq", found again by its tag."""

    def __init__(self, uri: str, run: str) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        try:
            self._run_id, self.last = self._found_or_made(run)
        except (MlflowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise TrackingError(f"MLflow at {uri} cannot be used: {reason}") from None

    def _found_or_made(self, run: str) -> tuple[str, int]:
        known = self._client.get_experiment_by_name("fedmpq")
        experiment = self._client.create_experiment("fedmpq") if known is None else known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`fedmpq.run` = '{run}'")
        if found:
            return found[0].info.run_id, int(found[0].data.tags.get("fedmpq.round", 0))
        made = self._client.create_run(experiment, tags={"fedmpq.run": run}, run_name=run)
        return made.info.run_id, 0

    def add(self, facts: RoundFacts) -> None:
        for name, value in scalars(facts).items():
            self._client.log_metric(self._run_id, name, value, step=facts.round)
        self._client.set_tag(self._run_id, "fedmpq.round", facts.round)
        self.last = facts.round

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _noted(note: Path) -> int:
    try:
        return int(json.loads(note.read_text(encoding="utf-8"))["round"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise TrackingError(f"{note} is damaged ({error}): delete its folder to write it anew") from None
