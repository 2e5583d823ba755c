"""What is reported of a round when it is merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.method.evaluation import by_budget, deployed_scores, mean_others
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import GlobalModel
from fedmpq.model.metrics import METRICS, metric_named
from fedmpq.model.task import CLASSIFICATION, Task
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
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics beside the task's own, by name: means over the clients."""


def measured_on(method: QuantizedMethod, model: GlobalModel, test: Dataset) -> Measured:
    """By the server, of what each client's device runs."""
    scores = deployed_scores(method, model, test)
    values = {client: score.value for client, score in scores.items()}
    return Measured(values, "server", others=mean_others(scores))


METRIC, OTHERS = "metric", "others"
CHECKED = "checked_accuracy"
"""By which a model that was handed out is compared with the next; None: by nothing."""


def accuracy_facts(model: GlobalModel, measured: Measured, task: Task) -> dict[str, Any]:
    """What the server measured is checked by its mean, what clients report by its median: fewer than half of
    them cannot move it beyond what the others report. Of another task than classification the metric is
    named."""
    # In the order of clients, as in a simulation: a sum in another one differs in its last bits.
    found = [measured.accuracies[client] for client in sorted(measured.accuracies)]
    named = {} if task == CLASSIFICATION else {METRIC: METRICS[task].key, OTHERS: dict(measured.others)}
    checked = np.mean if measured.by == "server" else np.median
    return {
        CHECKED: float(checked(found)) if found and measured.of_this else None,
        "deployed_accuracy": by_budget(measured.accuracies, model.clients),
        "mean_deployed_accuracy": float(np.mean(found)) if found else None,
        "measured_by": measured.by if found else "",
        **named,
    }


PHASE_SECONDS = "phases"


def time_facts(*parts: Mapping[str, float]) -> dict[str, Any]:
    """The seconds of a round, and where they went; of several parts those of one phase add up."""
    names = dict.fromkeys(name for part in parts for name in part)
    phases = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {"seconds": sum(phases.values()), PHASE_SECONDS: phases}


class TooMuchWorse(ValueError):
    """A merged model whose accuracy fell by more than the run allows."""


def checked_facts(
    model: GlobalModel, measured: Measured, task: Task, before: float | None, most: float | None
) -> dict[str, Any]:
    """The facts of what was measured; raises if they are less than `before` by more than `most`."""
    facts = accuracy_facts(model, measured, task)
    check_drop(before, facts, most)
    return facts


def check_drop(before: float | None, facts: dict[str, Any], most: float | None) -> None:
    """Raises if the accuracy is less than `before` by more than `most`; None: it may be anything."""
    now: float | None = facts[CHECKED]
    if most is None or before is None or now is None:
        return
    if before - now > most:
        what = metric_named(facts.get(METRIC, "")).title
        raise TooMuchWorse(
            f"the {what} fell from {before:.4f} to {now:.4f}, by more than max_accuracy_drop = {most:g}"
        )
