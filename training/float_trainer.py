"""Local training in full precision: the ordinary `torch.nn.Module` with torch's own SGD. For research alone;
it needs torch and room for a float model, which boards do not have."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate, compress
from fedmpq.exchange.messages import Calibration, TrainingPlan
from fedmpq.model.calibration import MergedStatistics, calibration_batches, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.module_input import as_taken
from fedmpq.model.module_state import initial_state, load_state
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.randomness import Draws
from fedmpq.model.task import answers_of
from fedmpq.training.engine import TrainingError
from fedmpq.training.label_prior import logit_shift
from fedmpq.training.local_round import batches, require_finite
from fedmpq.training.torch_losses import loss_of, shifted

EVALUATION_BATCH = 250


class FloatTrainer:
    """One module that is given each client's model in turn."""

    def __init__(self, graph: Graph, module: nn.Module) -> None:
        self._graph = graph
        # A quarter faster on CPUs: images come as rows of pixels anyway.
        self._module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._pristine = copy.deepcopy(self._module.state_dict())

    def train(self, assignment: FloatAssignment, data: Dataset) -> FloatUpdate:
        """The change of the weights by local SGD, compressed as the assignment says."""
        self._load(assignment)
        draws, plan = assignment.draws, assignment.plan
        with _seeded(draws):
            loss = _descend(self._module, self._graph, data, plan, draws)
        weights, side = initial_state(self._module, self._graph)
        require_finite(weights | side, plan)
        changes = {name: tensor - assignment.weights[name] for name, tensor in weights.items()}
        sent = compress(assignment.compression, changes, assignment.budget, draws)
        return FloatUpdate(assignment.round, assignment.client, len(data), sent, side, loss)

    def measure(self, assignment: FloatAssignment, data: Dataset) -> Calibration:
        """By the module's own BatchNorms: with a momentum of one they hold the last batch's statistics."""
        self._load(assignment)
        self._module.train()
        merged, draws = MergedStatistics(), assignment.draws
        with torch.no_grad(), _momentum_of_norms(self._module, 1.0), _seeded(draws):
            for images in calibration_batches(draws, assignment.plan.batch_size, data.images):
                self._module(_real(images, self._graph, self._module))
                _, side = initial_state(self._module, self._graph)
                merged.add(len(images), {name: side[name] for name in statistics_names(self._graph)})
        return Calibration(assignment.round, assignment.client, len(data), merged.statistics())

    def logits(self, weights: Weights, side: Side, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The logits of the module with these weights, in evaluation mode."""
        load_state(self._module, self._graph, weights, side)
        self._module.eval()
        with torch.no_grad():
            parts = [
                self._module(_real(images[i : i + EVALUATION_BATCH], self._graph, self._module)).numpy()
                for i in range(0, len(images), EVALUATION_BATCH)
            ]
        return np.concatenate(parts)

    def _load(self, assignment: FloatAssignment) -> None:
        # A module may hold more state than its graph, such as BatchNorm's counters: none may pass from one
        # client to the next that this process happens to train.
        self._module.load_state_dict(self._pristine)
        load_state(self._module, self._graph, assignment.weights, assignment.side)


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


def _real(images: NDArray[np.uint8], graph: Graph, module: nn.Module) -> torch.Tensor:
    centred = (images.astype(np.float32) - graph.input.zero_point) * np.float32(graph.input.scale)
    return as_taken(module, torch.from_numpy(centred).permute(0, 3, 1, 2))


@contextmanager
def _seeded(draws: Draws) -> Iterator[None]:
    """Dropout draws from torch's own generator: it must depend on the task alone too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence(astuple(draws)).generate_state(1)[0]))
        yield


def _descend(module: nn.Module, graph: Graph, data: Dataset, plan: TrainingPlan, draws: Draws) -> float:
    """Local SGD; the mean loss of the last epoch."""
    module.train()
    shift = logit_shift(graph, plan, data.labels)
    adjustment = None if shift is None else torch.from_numpy(shift)
    optimizer = torch.optim.SGD(
        module.parameters(), plan.learning_rate, momentum=plan.momentum, weight_decay=plan.weight_decay
    )
    mean_loss = 0.0
    for epoch in range(plan.epochs):
        total, samples = 0.0, 0
        for images, given in batches(data, plan, draws, epoch, graph.input.zero_point):
            answers = torch.from_numpy(answers_of(graph, images, given))
            optimizer.zero_grad(set_to_none=True)
            outputs = shifted(graph.task, module(_real(images, graph, module)), adjustment)
            loss = loss_of(graph.task, outputs, answers)
            if not math.isfinite(loss.item()):
                raise TrainingError(
                    f"the loss is {loss.item()}; lower the learning rate (now {plan.learning_rate})"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total, samples = total + loss.item() * len(images), samples + len(images)
        mean_loss = total / max(1, samples)
    return mean_loss
