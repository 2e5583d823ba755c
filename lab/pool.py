"""Where a simulation's clients train: the seam between its rounds and whatever runs their tasks.

A result depends on its task alone, never on which worker did it or how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.lab.experiment import ExperimentError
from fedmpq.lab.probes import Probe
from fedmpq.method.running_merge import PartialMerge
from fedmpq.method.state import GlobalModel
from fedmpq.model.metrics import Score

Sent = TypeVar("Sent", bound=Assignment | FloatAssignment)
Returned = TypeVar("Returned", bound=Update | FloatUpdate)
SentToPool = TypeVar("SentToPool", bound=Assignment | FloatAssignment, contravariant=True)
ReturnedByPool = TypeVar("ReturnedByPool", bound=Update | FloatUpdate, covariant=True)

Parts = Sequence[NDArray[np.int64]]
"""By client: the indices of its training samples. It may draw them when they are asked for."""

PROCESSES, RAY = "processes", "ray"
RAY_SCHEME = "ray://"


class WorkerError(RuntimeError):
    """A worker that died, or that cannot be started."""


class Pool(Protocol[SentToPool, ReturnedByPool]):
    """What a simulation needs of its workers."""

    def train(self, assignments: Iterable[SentToPool]) -> Iterator[ReturnedByPool]:
        """Updates as they are ready."""

    def calibrate(self, assignments: Iterable[SentToPool]) -> list[Calibration]:
        """The statistics that each client measures, in order."""

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        """How well each probe does on the test data, in order."""

    def close(self) -> None:
        """End the workers, and clear away what they had."""


@dataclass(frozen=True)
class Trained:
    """What is told of a client's training, wherever its update is."""

    client: int
    loss: float
    bytes_up: int


@runtime_checkable
class SummingPool(Protocol):
    """Workers that can sum what their clients have changed, so that no update has to leave them."""

    def sums(self, clients: int) -> bool:
        """Whether that is worth while in a round of so many clients."""

    def train_summed(
        self, model: GlobalModel, assignments: Iterable[Assignment]
    ) -> Iterator[Trained | PartialMerge]:
        """What is told of each client, once it is trained, and at last the sum of all their changes.

        `model` is what they were sent, with their bit-widths; the rule is a plain mean in whole numbers.
        """


def require_place(on: str) -> None:
    """An error unless this names a place where clients can train."""
    if on not in (PROCESSES, RAY) and not (on.startswith(RAY_SCHEME) and len(on) > len(RAY_SCHEME)):
        raise ExperimentError(f"on = {on!r} is none of {PROCESSES}, {RAY} and {RAY_SCHEME}HOST:PORT")
