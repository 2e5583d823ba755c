"""The methods of the tables behind one small interface: what to send, how to train, what to upload,
how to merge.

The quantized ones are the server's own method objects and the board's own local round; the simulator only
replaces the socket between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, Calibration, Update, pack_layers, unpack_layers
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.initial import seeded_state
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import QUANTIZED_METHODS
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model import integer_forward
from fedmpq.model.graph import Graph
from fedmpq.model.integer_program import compile_program
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import PackedLayer, Side, Weights
from fedmpq.training.engine import make_engine
from fedmpq.training.local_calibration import run_calibration
from fedmpq.training.local_round import run_local_round


class Uploaded(Protocol):
    """What every kind of update can tell."""

    @property
    def client(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def nbytes(self) -> int: ...


class Sent(Protocol):
    """What every kind of assignment can tell."""

    @property
    def client(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Probe:
    """One model to evaluate: the full-precision `W`, or what the devices of some clients run."""

    clients: tuple[int, ...]
    """Whose devices run it; empty for `W`."""
    side: Side
    weights: Weights | None = None
    layers: dict[str, PackedLayer] | None = None


class Method(Protocol):
    """A federated method: `train`, `measure` and `logits` run in a worker, the rest at the server."""

    def start(self, clients: Sequence[ClientRecord]) -> GlobalModel: ...
    def assign(self, model: GlobalModel, client: ClientRecord) -> Sent: ...
    def train(self, assignment: Any, data: Dataset) -> Uploaded: ...
    def merge(self, model: GlobalModel, updates: Iterable[Any]) -> GlobalModel: ...
    @property
    def calibrates(self) -> bool: ...
    def calibration(self, model: GlobalModel, client: ClientRecord) -> Sent: ...
    def measure(self, assignment: Any, data: Dataset) -> Calibration: ...
    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel: ...
    def probes(self, model: GlobalModel) -> list[Probe]: ...
    def logits(self, probe: Probe, images: NDArray[np.uint8]) -> NDArray[np.float32]: ...


class QuantizedSimulation:
    """FedMPQ, AQFL, FPQ8 and the ablations."""

    def __init__(self, experiment: Experiment, graph: Graph, classes: int) -> None:
        self._experiment = experiment
        self._graph = graph
        self._classes = classes
        self._method = QuantizedMethod(graph, experiment.recipe(), experiment.seed)

    def start(self, clients: Sequence[ClientRecord]) -> GlobalModel:
        weights, side = seeded_state(self._experiment, self._graph, self._classes)
        return self._method.start(weights, side, clients)

    def assign(self, model: GlobalModel, client: ClientRecord) -> Assignment:
        return self._method.assign(model, client)

    def train(self, assignment: Assignment, data: Dataset) -> Update:
        return run_local_round(make_engine(self._experiment.engine, threads=1), self._graph, assignment, data)

    def merge(self, model: GlobalModel, updates: Iterable[Update]) -> GlobalModel:
        return self._method.merge(model, updates)

    @property
    def calibrates(self) -> bool:
        return self._method.calibrates

    def calibration(self, model: GlobalModel, client: ClientRecord) -> Assignment:
        return self._method.calibration(model, client)

    def measure(self, assignment: Assignment, data: Dataset) -> Calibration:
        return run_calibration(self._graph, assignment, data)

    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel:
        return self._method.calibrated(model, found)

    def probes(self, model: GlobalModel) -> list[Probe]:
        """`W`, and each distinct assignment once."""
        final = model.final
        return [Probe((), final.side, weights=final.weights)] + [
            Probe(tuple(client.client for client in each.clients), each.side, layers=pack_layers(each.layers))
            for each in self._method.deployments(model, model.clients)
        ]

    def logits(self, probe: Probe, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        from fedmpq.training.torch_engine import full_precision_logits

        if probe.layers is None:
            assert probe.weights is not None
            return full_precision_logits(self._graph, probe.weights, probe.side, images)
        program = compile_program(self._graph, unpack_layers(self._graph, probe.layers), probe.side)
        return integer_forward.logits(program, images, products=native_products)


def make_method(experiment: Experiment, graph: Graph, classes: int) -> Method:
    """The method an experiment names."""
    if experiment.method in QUANTIZED_METHODS:
        return QuantizedSimulation(experiment, graph, classes)
    from fedmpq.lab.float_method import FLOAT_SIMULATIONS

    return FLOAT_SIMULATIONS[experiment.method](experiment, graph, classes)
