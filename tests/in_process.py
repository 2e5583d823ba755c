"""The simulator's pool without its processes: seconds faster to start, and under the test's own eyes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.probes import Probe
from fedmpq.lab.workers import Worker
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score

Sent = Assignment | FloatAssignment
Returned = Update | FloatUpdate


class InProcessPool:
    """Trains one client after the other, the last one first: which one is ready first must not matter."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        parts: Sequence[NDArray[np.int64]],
        workers: int,
        module: torch.nn.Module | None = None,
    ) -> None:
        self.graph = graph
        self._worker = Worker(experiment, graph, train, test, parts, module)
        self._threads = torch.get_num_threads()

    def __enter__(self) -> InProcessPool:
        # As in a worker: another number of threads may sum in another order.
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)

    def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
        for assignment in reversed(list(assignments)):
            yield self._worker.train(assignment)

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        return [self._worker.measure(assignment) for assignment in assignments]

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        return [self._worker.score(probe) for probe in probes]
