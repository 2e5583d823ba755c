"""An experiment that is over in a second or two, for tests of where and how clients train."""

from __future__ import annotations

from typing import Any

from fedmpq.lab.experiment import Experiment, make_experiment
from fedmpq.lab.simulation import Progress

SMALL: dict[str, Any] = {
    "data": "digits",
    "model": "digits_cnn",
    "train_limit": 80,
    "test_limit": 40,
    "budgets": [2, 4, 4, 8],
    "participation": 0.75,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 8,
}


def small(**changes: object) -> Experiment:
    return make_experiment({**SMALL, **changes})


def silent(_: Progress) -> None:
    pass
