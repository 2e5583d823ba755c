"""The simulator's pool without its processes: seconds faster to start, and under the test's own eyes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.pool import Parts
from fedmpq.lab.probes import Probe
from fedmpq.lab.worker import Worker
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
        parts: Parts,
        workers: int | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self.graph = graph
        self._worker, self._parts = Worker(experiment, graph, train, test, module), parts
        self._threads = torch.get_num_threads()
        # As in a worker: another number of threads may sum in another order.
        torch.set_num_threads(1)

    def close(self) -> None:
        torch.set_num_threads(self._threads)

    def train(self, assignments: Iterable[Sent]) -> Iterator[Returned]:
        for assignment in reversed(list(assignments)):
            yield self._worker.train(assignment, self._parts[assignment.client])

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        return [self._worker.measure(one, self._parts[one.client]) for one in assignments]

    def scores(self, probes: Iterable[Probe]) -> list[Score]:
        return [self._worker.score(probe) for probe in probes]
