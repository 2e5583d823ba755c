"""The model an experiment starts from, given its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmpq.data.dataset import Dataset
from fedmpq.lab.experiment import Experiment
from fedmpq.model import first_model
from fedmpq.model.graph import Graph
from fedmpq.model.task import outputs_of

if TYPE_CHECKING:
    from torch import nn


def seeded_module(experiment: Experiment, outputs: int, channels: int) -> nn.Module:
    """The module with the weights its own initialisation draws from the experiment's seed."""
    return first_model.seeded_module(experiment.model, experiment.seed, outputs, channels)


def make_graph(experiment: Experiment, train: Dataset, module: nn.Module | None = None) -> Graph:
    """The experiment's model, traced at the size of its images and with their normalisation."""
    image = first_model.ImageFormat(*train.image_shape, *train.normalisation())
    outputs = outputs_of(experiment.task, len(train.class_names), train.image_shape)
    network = module or seeded_module(experiment, outputs, image.channels)
    bits = experiment.activation_bits
    return first_model.traced_graph(experiment.model, network, image, bits, experiment.task)
