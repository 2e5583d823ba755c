"""The model an experiment starts from, given its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmpq.data.dataset import Dataset
from fedmpq.lab.experiment import Experiment
from fedmpq.model import start
from fedmpq.model.graph import Graph

if TYPE_CHECKING:
    from torch import nn


def seeded_module(experiment: Experiment, classes: int, channels: int) -> nn.Module:
    """The module with the weights its own initialisation draws from the experiment's seed."""
    return start.seeded_module(experiment.model, experiment.seed, classes, channels)


def make_graph(experiment: Experiment, train: Dataset, module: nn.Module | None = None) -> Graph:
    """The experiment's model, traced at the size of its images and with their normalisation."""
    image = start.ImageFormat(*train.image_shape, *train.normalisation())
    network = module or seeded_module(experiment, len(train.class_names), image.channels)
    return start.start_graph(experiment.model, network, image, experiment.activation_bits)
