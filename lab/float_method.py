"""The methods that train in full precision: FP32 (FedAvg), and FedPAQ and UVeQFed, which compress what is
uploaded.

A client trains the ordinary `torch.nn.Module` with torch's own SGD. What goes back is the change of the
weights, encoded; side tensors go as they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Calibration, TrainingPlan
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.initial import seeded_module, seeded_state
from fedmpq.lab.methods import Probe
from fedmpq.method import fedpaq, uveqfed
from fedmpq.method.aggregate import WeightedSum, merge_deltas, next_average, participation_weights
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import MergedStatistics, calibration_batches, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.model.trace import initial_state, load_state
from fedmpq.training.engine import TrainingError
from fedmpq.training.local_round import batches, require_finite


@dataclass(frozen=True)
class FloatAssignment:
    """The whole model in full precision."""

    client: int
    round: int
    budget: float
    weights: Weights
    side: Side

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.side.values()))


@dataclass(frozen=True)
class FloatUpdate:
    """The decoded change of the weights, and how many bytes it took to send."""

    client: int
    samples: int
    deltas: Weights
    side: Side
    loss: float
    nbytes: int


Codec = Callable[[Weights, float, Draws], tuple[Weights, int]]
"""`(change of every layer, budget, draws) -> (what the server decodes, bytes sent)`."""


def send_exact(changes: Weights, budget: float, draws: Draws) -> tuple[Weights, int]:
    """FP32: the change itself."""
    return changes, sum(change.nbytes for change in changes.values())


def send_fedpaq(changes: Weights, budget: float, draws: Draws) -> tuple[Weights, int]:
    """FedPAQ: unbiased stochastic levels of each layer; a weight takes whole bits: a budget of 2.5 is 2."""
    payloads = {
        name: fedpaq.encode(change, int(budget), draws.uniform(change.size, Purpose.UPLOAD, layer=layer))
        for layer, (name, change) in enumerate(changes.items())
    }
    decoded = {name: fedpaq.decode(payload) for name, payload in payloads.items()}
    return decoded, sum(payload.nbytes for payload in payloads.values())


def send_uveqfed(changes: Weights, budget: float, draws: Draws) -> tuple[Weights, int]:
    """UVeQFed: the whole change on one dithered hexagonal lattice; both sides draw the same dither."""
    flat = np.concatenate([change.ravel() for change in changes.values()])
    dither = draws.uniform(uveqfed.uniforms_needed(flat.size), Purpose.UPLOAD)
    payload = uveqfed.encode(flat, budget, dither)
    ends = np.cumsum([change.size for change in changes.values()])
    parts = np.split(uveqfed.decode(payload, dither), ends[:-1])
    decoded = {
        name: part.reshape(change.shape) for part, (name, change) in zip(parts, changes.items(), strict=True)
    }
    return decoded, payload.nbytes


class FloatSimulation:
    """FedAvg with a codec on the uplink."""

    def __init__(self, experiment: Experiment, graph: Graph, classes: int, codec: Codec) -> None:
        self._experiment = experiment
        self._graph = graph
        self._codec = codec
        module = seeded_module(experiment, classes, graph.input.channels)
        # A quarter faster on CPUs: images come as rows of pixels anyway.
        self._module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._pristine = copy.deepcopy(self._module.state_dict())
        self._classes = classes

    def start(self, clients: Sequence[ClientRecord]) -> GlobalModel:
        weights, side = seeded_state(self._experiment, self._graph, self._classes)
        return GlobalModel(0, weights, side, (MAX_BITS * 4,) * len(self._graph.layers), tuple(clients))

    def assign(self, model: GlobalModel, client: ClientRecord) -> FloatAssignment:
        return FloatAssignment(client.client, model.round + 1, client.budget, model.weights, model.side)

    def train(self, assignment: FloatAssignment, data: Dataset) -> FloatUpdate:
        # A module may hold more state than its graph, such as BatchNorm's counters: none may pass from one
        # client to the next that this process happens to train.
        self._module.load_state_dict(self._pristine)
        load_state(self._module, self._graph, assignment.weights, assignment.side)
        draws = Draws(self._experiment.seed, assignment.client, assignment.round)
        plan = self._experiment.rates().plan(self._experiment.plan(), assignment.round)
        loss = _train(self._module, self._graph, data, plan, draws)
        weights, side = initial_state(self._module, self._graph)
        require_finite(weights | side, plan)
        changes = {name: tensor - assignment.weights[name] for name, tensor in weights.items()}
        deltas, nbytes = self._codec(changes, assignment.budget, draws)
        nbytes += sum(tensor.nbytes for tensor in side.values())
        return FloatUpdate(assignment.client, len(data), deltas, side, loss, nbytes)

    def merge(self, model: GlobalModel, updates: Iterable[FloatUpdate]) -> GlobalModel:
        """`W + sum p_n * decoded change`, `p_n` by the data alone."""
        ordered = sorted(updates, key=lambda update: update.client)
        shares = participation_weights([1.0] * len(ordered), [update.samples for update in ordered])
        changes, side = WeightedSum(), WeightedSum()
        for share, update in zip(shares, ordered, strict=True):
            changes.add(float(share), update.deltas)
            side.add(float(share), update.side)
        new, new_side = merge_deltas(model.weights, changes), side.mean()
        average = next_average(model, new, new_side, self._experiment.averaging or 0.0)
        return replace(model, round=model.round + 1, weights=new, side=new_side, average=average)

    @property
    def calibrates(self) -> bool:
        return self._experiment.calibrates and bool(statistics_names(self._graph))

    def calibration(self, model: GlobalModel, client: ClientRecord) -> FloatAssignment:
        final = model.final
        return FloatAssignment(client.client, model.round, client.budget, final.weights, final.side)

    def measure(self, assignment: FloatAssignment, data: Dataset) -> Calibration:
        """By the module's own BatchNorms: with a momentum of one they hold the last batch's statistics."""
        self._module.load_state_dict(self._pristine)
        load_state(self._module, self._graph, assignment.weights, assignment.side)
        self._module.train()
        plan, merged = self._experiment.plan(), MergedStatistics()
        draws = Draws(self._experiment.seed, assignment.client, assignment.round)
        with torch.no_grad(), _momentum_of_norms(self._module, 1.0), _seeded(draws):
            for images in calibration_batches(draws, plan.batch_size, data.images):
                self._module(_real(images, self._graph))
                _, side = initial_state(self._module, self._graph)
                merged.add(len(images), {name: side[name] for name in statistics_names(self._graph)})
        return Calibration(assignment.round, assignment.client, len(data), merged.statistics())

    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel:
        merged = MergedStatistics()
        for one in found:
            merged.add(one.samples, one.statistics)
        return model.with_final_side({**model.final.side, **merged.statistics()})

    def probes(self, model: GlobalModel) -> list[Probe]:
        """Every device runs `W`, or its moving average."""
        return [Probe((), model.final.side, weights=model.final.weights)]

    def logits(self, probe: Probe, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        assert probe.weights is not None
        load_state(self._module, self._graph, probe.weights, probe.side)
        self._module.eval()
        with torch.no_grad():
            parts = [
                self._module(_real(images[i : i + 250], self._graph)).numpy()
                for i in range(0, len(images), 250)
            ]
        return np.concatenate(parts)


@contextmanager
def _momentum_of_norms(module: nn.Module, momentum: float) -> Iterator[None]:
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm, own in zip(norms, before, strict=True):
            norm.momentum = own


def _real(images: NDArray[np.uint8], graph: Graph) -> torch.Tensor:
    centred = (images.astype(np.float32) - graph.input.zero_point) * np.float32(graph.input.scale)
    return torch.from_numpy(centred).permute(0, 3, 1, 2)


def _train(module: nn.Module, graph: Graph, data: Dataset, plan: TrainingPlan, draws: Draws) -> float:
    """Local SGD; the mean loss of the last epoch."""
    with _seeded(draws):
        return _descend(module, graph, data, plan, draws)


@contextmanager
def _seeded(draws: Draws) -> Iterator[None]:
    """Dropout draws from torch's own generator: it must depend on the task alone too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(astuple(draws)).generate_state(1)[0]))
        yield


def _descend(module: nn.Module, graph: Graph, data: Dataset, plan: TrainingPlan, draws: Draws) -> float:
    module.train()
    optimizer = torch.optim.SGD(
        module.parameters(), plan.learning_rate, momentum=plan.momentum, weight_decay=plan.weight_decay
    )
    mean_loss = 0.0
    for epoch in range(plan.epochs):
        total, samples = 0.0, 0
        for images, labels in batches(data, plan, draws, epoch, graph.input.zero_point):
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(module(_real(images, graph)), torch.from_numpy(labels))
            if not math.isfinite(loss.item()):
                raise TrainingError(
                    f"the loss is {loss.item()}; lower the learning rate (now {plan.learning_rate})"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total, samples = total + loss.item() * len(labels), samples + len(labels)
        mean_loss = total / max(1, samples)
    return mean_loss


def _with_codec(codec: Codec) -> Callable[[Experiment, Graph, int], FloatSimulation]:
    return lambda experiment, graph, classes: FloatSimulation(experiment, graph, classes, codec)


FLOAT_SIMULATIONS = {
    "fp32": _with_codec(send_exact),
    "fedpaq": _with_codec(send_fedpaq),
    "uveqfed": _with_codec(send_uveqfed),
}
