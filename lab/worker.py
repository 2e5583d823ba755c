"""What one worker of a simulation does, wherever it runs: trains clients and evaluates models."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.data.tasks import anomalies
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update, unpack_layers
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.first_model import seeded_module
from fedmpq.lab.probes import IntegerProbe, Probe
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score, score_of
from fedmpq.system.heap import keep_freed_memory
from fedmpq.training.engine import TrainingError
from fedmpq.training.integer_trainer import IntegerTrainer

if TYPE_CHECKING:
    from torch import nn

    from fedmpq.training.float_trainer import FloatTrainer


class Worker:
    """Trains clients and evaluates models, one task after the other."""

    def __init__(
        self,
        experiment: Experiment,
        graph: Graph,
        train: Dataset,
        test: Dataset,
        module: nn.Module | None = None,
    ) -> None:
        self._experiment = experiment
        self._graph = graph
        self._train, self._test = train, test
        self._module = module
        self._integers = IntegerTrainer(graph, experiment.engine)

    @cached_property
    def _floats(self) -> FloatTrainer:
        from fedmpq.training.float_trainer import FloatTrainer

        outputs, channels = self._graph.shapes[self._graph.output][0], self._graph.input.channels
        return FloatTrainer(self._graph, self._module or seeded_module(self._experiment, outputs, channels))

    def train(
        self, assignment: Assignment | FloatAssignment, part: NDArray[np.int64]
    ) -> Update | FloatUpdate:
        """What a client with these training samples gives back."""
        data = self._train.subset(part)
        try:
            if isinstance(assignment, FloatAssignment):
                return self._floats.train(assignment, data)
            return self._integers.train(assignment, data)
        except TrainingError as error:
            raise TrainingError(f"client {assignment.client}, round {assignment.round}: {error}") from None

    def measure(self, assignment: Assignment | FloatAssignment, part: NDArray[np.int64]) -> Calibration:
        """The statistics that a client with these training samples measures."""
        data = self._train.subset(part)
        if isinstance(assignment, FloatAssignment):
            return self._floats.measure(assignment, data)
        return self._integers.measure(assignment, data)

    def score(self, probe: Probe) -> Score:
        """How well the probe does on the test data."""
        test = self._test
        given = test.labels if test.targets is None else test.targets
        return score_of(self._graph, self._logits(probe), test.images, given, anomalies(test))

    def _logits(self, probe: Probe) -> NDArray[np.float32]:
        from fedmpq.training.torch_engine import full_precision_logits

        graph, images = self._graph, self._test.images
        if isinstance(probe, IntegerProbe):
            return DeployedModel(graph, unpack_layers(graph, probe.layers), probe.side).logits(images)
        if self._experiment.trains_floats:
            return self._floats.logits(probe.weights, probe.side, images)
        return full_precision_logits(graph, probe.weights, probe.side, images)


def one_thread_each() -> None:
    """For a worker process: torch computes on one thread, here and when it is loaded later.

    It takes a second to load, and the native engine does without: only what evaluates loads it.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # A model that diverges overflows on its way there; what it comes to is checked, and told once.
    np.seterr(over="ignore", invalid="ignore")


def keep_memory_for(experiment: Experiment) -> None:
    """For a worker process: full precision has whole tensors of the same sizes in every step, and takes an
    eighth less time when their memory stays mapped."""
    if experiment.trains_floats:
        keep_freed_memory()
