"""The model an experiment starts from: the same seed gives the same graph and the same weights."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import nn

from fedmpq.edge_client.data import Dataset
from fedmpq.lab.experiment import Experiment
from fedmpq.model import zoo
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.trace import initial_state, trace


def seeded_module(experiment: Experiment, classes: int, channels: int) -> nn.Module:
    """The module with the weights its own initialisation draws from the experiment's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        return zoo.build(experiment.model, classes=classes, channels=channels)


def make_graph(experiment: Experiment, train: Dataset) -> Graph:
    """The experiment's model, traced at the size of its images and with their normalisation."""
    height, width, channels = train.image_shape
    module = seeded_module(experiment, len(train.class_names), channels)
    scale, zero_point = train.normalisation()
    with _only_the_error():
        return trace(
            module,
            torch.zeros(1, channels, height, width),
            name=experiment.model.replace("/", "."),
            activation_bits=experiment.activation_bits,
            input_scale=scale,
            input_zero_point=zero_point,
        )


@contextmanager
def _only_the_error() -> Iterator[None]:
    """Before torch.export refuses a module it prints what it has so far; the error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def seeded_state(experiment: Experiment, graph: Graph, classes: int) -> tuple[Weights, Side]:
    """Weights and side tensors before the first round."""
    return initial_state(seeded_module(experiment, classes, graph.input.channels), graph)
