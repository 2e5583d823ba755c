"""What is reported of a round when it is merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpq.method.evaluation import by_budget
from fedmpq.method.state import GlobalModel
from fedmpq.server.store.records import OpenedRound


def traffic(closed: OpenedRound) -> tuple[dict[int, int], dict[int, int]]:
    """Payload bytes by client: of answers, and of what was sent."""
    up = {seat.client: answer.payload_bytes for seat, answer in closed.answers()}
    return up, {seat.client: seat.payload_bytes for seat in closed.seats}


@dataclass(frozen=True)
class Measured:
    """How well a model does."""

    accuracies: Mapping[int, float] = field(default_factory=dict)
    """By client, those that were measured."""
    by: str = ""
    """Who measured: "server" or "clients"."""
    of_this: bool = True
    """Whether it is of the model that is handed out, and not of the one before."""


CHECKED = "checked_accuracy"
"""By which a model that was handed out is compared with the next; None: by nothing."""


def accuracy_facts(model: GlobalModel, measured: Measured) -> dict[str, Any]:
    """What the server measured is checked by its mean, what clients report by its median: fewer than half of
    them cannot move it beyond what the others report."""
    found = list(measured.accuracies.values())
    checked = np.mean if measured.by == "server" else np.median
    return {
        CHECKED: float(checked(found)) if found and measured.of_this else None,
        "deployed_accuracy": by_budget(measured.accuracies, model.clients),
        "mean_deployed_accuracy": float(np.mean(found)) if found else None,
        "measured_by": measured.by if found else "",
    }


PHASE_SECONDS = "phases"


def time_facts(*parts: Mapping[str, float]) -> dict[str, Any]:
    """The seconds of a round, and where they went; of several parts those of one phase add up."""
    names = dict.fromkeys(name for part in parts for name in part)
    phases = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {"seconds": sum(phases.values()), PHASE_SECONDS: phases}


class TooMuchWorse(ValueError):
    """A merged model whose accuracy fell by more than the run allows."""


def check_drop(before: float | None, facts: dict[str, Any], most: float | None) -> None:
    """Raises if the accuracy is less than `before` by more than `most`; None: it may be anything."""
    now: float | None = facts[CHECKED]
    if most is None or before is None or now is None:
        return
    if before - now > most:
        raise TooMuchWorse(
            f"the accuracy fell from {before:.4f} to {now:.4f}, by more than max_accuracy_drop = {most:g}"
        )
