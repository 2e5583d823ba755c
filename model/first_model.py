"""The model a run starts from: the same name and seed give the same graph and the same weights."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedmpq.model import zoo
from fedmpq.model.graph import Graph
from fedmpq.model.module_input import as_taken
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.task import CLASSIFICATION, Task, outputs_of
from fedmpq.model.trace import trace

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ImageFormat:
    """The images a model takes: codes `a` in 0..255 standing for `scale * (a - zero_point)`."""

    height: int
    width: int
    channels: int
    scale: float
    zero_point: int


def make_first_model(
    name: str,
    seed: int,
    classes: int,
    image: ImageFormat,
    activation_bits: int | None,
    task: Task = CLASSIFICATION,
    first_clips: float = 1.0,
) -> tuple[Graph, Weights, Side]:
    """A model of the zoo or `module:function`, traced, with the weights its initialisation draws from `seed`.

    `activation_bits` None places no quantizers: the model of a method that trains in full precision.
    `classes` are the names of the run, of classes or targets; `first_clips` is `initial_state`'s.
    """
    outputs = outputs_of(task, classes, (image.height, image.width, image.channels))
    module = seeded_module(name, seed, outputs, image.channels)
    graph = traced_graph(name, module, image, activation_bits, task)
    return graph, *initial_state(module, graph, first_clips)


def seeded_module(name: str, seed: int, outputs: int, channels: int) -> nn.Module:
    """The module with the weights its own initialisation draws from the seed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return zoo.build(name, classes=outputs, channels=channels)


def traced_graph(
    name: str,
    module: nn.Module,
    image: ImageFormat,
    activation_bits: int | None,
    task: Task = CLASSIFICATION,
) -> Graph:
    """The module traced at the size of the images, for a task."""
    import torch

    with _only_the_error():
        graph = trace(
            module,
            as_taken(module, torch.zeros(1, image.channels, image.height, image.width)),
            name=name.replace("/", "."),
            activation_bits=activation_bits,
            input_scale=image.scale,
            input_zero_point=image.zero_point,
        )
    return replace(graph, task=task)


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
