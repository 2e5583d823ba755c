"""What is reported of a round when it is merged."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmpq.method.evaluation import by_budget
from fedmpq.method.state import GlobalModel
from fedmpq.server.store.records import OpenedRound


def traffic(closed: OpenedRound) -> tuple[dict[int, int], dict[int, int]]:
    """Payload bytes by client: of answers, and of what was sent."""
    up = {seat.client: answer.payload_bytes for seat, answer in closed.answers()}
    return up, {seat.client: seat.payload_bytes for seat in closed.seats}


def accuracy_facts(model: GlobalModel, accuracies: dict[int, float], measured_by: str) -> dict[str, Any]:
    return {
        "deployed_accuracy": by_budget(accuracies, model.clients),
        "mean_deployed_accuracy": float(np.mean(list(accuracies.values()))) if accuracies else None,
        "measured_by": measured_by if accuracies else "",
    }


class TooMuchWorse(ValueError):
    """A merged model whose accuracy fell by more than the run allows."""


def check_drop(before: float | None, facts: dict[str, Any], most: float | None) -> None:
    """Raises if the server measured less than `before` by more than `most`; None: it may be anything."""
    now: float | None = facts["mean_deployed_accuracy"]
    if most is None or before is None or now is None or facts["measured_by"] != "server":
        return
    if before - now > most:
        raise TooMuchWorse(
            f"the accuracy fell from {before:.4f} to {now:.4f}, by more than max_accuracy_drop = {most:g}"
        )
