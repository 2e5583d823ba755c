"""The simulator's pool without its processes: seconds faster to start, and under the test's own eyes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Calibration
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.methods import Probe, Sent, Uploaded, make_method
from fedmpq.model.graph import Graph


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
    ) -> None:
        self._method = make_method(experiment, graph, len(train.class_names))
        self._train, self._test, self._parts = train, test, parts
        self._threads = torch.get_num_threads()

    def __enter__(self) -> InProcessPool:
        # As in a worker: another number of threads may sum in another order.
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)

    def train(self, assignments: Iterable[Sent]) -> Iterator[Uploaded]:
        for assignment in reversed(list(assignments)):
            yield self._method.train(assignment, self._train.subset(self._parts[assignment.client]))

    def calibrate(self, assignments: Iterable[Sent]) -> list[Calibration]:
        return [
            self._method.measure(assignment, self._train.subset(self._parts[assignment.client]))
            for assignment in assignments
        ]

    def accuracies(self, probes: Iterable[Probe]) -> list[float]:
        predicted = [self._method.logits(probe, self._test.images).argmax(axis=1) for probe in probes]
        return [float(np.mean(guess == self._test.labels)) for guess in predicted]
