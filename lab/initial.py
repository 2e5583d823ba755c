"""The model an experiment starts from, given its data."""

from __future__ import annotations

from torch import nn

from fedmpq.data.dataset import Dataset
from fedmpq.lab.experiment import Experiment
from fedmpq.model import start
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.trace import initial_state


def seeded_module(experiment: Experiment, classes: int, channels: int) -> nn.Module:
    """The module with the weights its own initialisation draws from the experiment's seed."""
    return start.seeded_module(experiment.model, experiment.seed, classes, channels)


def make_graph(experiment: Experiment, train: Dataset) -> Graph:
    """The experiment's model, traced at the size of its images and with their normalisation."""
    image = start.ImageFormat(*train.image_shape, *train.normalisation())
    module = seeded_module(experiment, len(train.class_names), image.channels)
    return start.start_graph(experiment.model, module, image, experiment.activation_bits)


def seeded_state(experiment: Experiment, graph: Graph, classes: int) -> tuple[Weights, Side]:
    """Weights and side tensors before the first round."""
    return initial_state(seeded_module(experiment, classes, graph.input.channels), graph)
