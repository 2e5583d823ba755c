"""A network small enough to train in a test, and images for it: for every folder of tests that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.model.graph import (
    INPUT,
    Add,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Input,
    Linear,
    Node,
    Relu,
)
from fedmpq.model.grid import StepRule
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.quantizers import place_quantizers


class Model(NamedTuple):
    graph: Graph
    layers: Layers
    side: Side


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    """A residual network of four layers for 6x5 images of three channels and three classes."""

    def make(
        bits: int = 4, rule: StepRule = "least_error", per_channel: bool = False, seed: int = 0
    ) -> Model:
        graph = _small_graph()
        random = np.random.default_rng(seed)
        layers: Layers = {}
        for node in graph.layers:
            shape = graph.weight_shape(node.name)
            weights = random.normal(0, np.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
            layers[node.name] = QuantizedLayer.from_weights(weights, bits, rule, per_channel)
        side = {name: _side_tensor(name, shape, random) for name, shape in graph.side_shapes().items()}
        return Model(graph, layers, side)

    return make


@pytest.fixture(scope="session")
def make_data() -> Callable[..., Dataset]:
    """Random images for `make_model`; an image's class shows in its brightness."""

    def make(count: int, seed: int = 0) -> Dataset:
        random = np.random.default_rng(seed)
        labels = random.integers(0, 3, count)
        images = random.integers(0, 120, (count, 6, 5, 3)) + 60 * labels[:, None, None, None]
        return Dataset(images.astype(np.uint8), labels.astype(np.int64), ("a", "b", "c"))

    return make


def _small_graph() -> Graph:
    nodes = (
        Node("stem", Conv2d(3, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, False), (INPUT,)),
        Node("stem_norm", BatchNorm(4, 1e-5, 0.125), ("stem",)),
        Node("stem_relu", Relu(0.0), ("stem_norm",)),
        Node("depthwise", Conv2d(4, 4, (3, 3), (1, 1), (1, 1), (1, 1), 4, False), ("stem_relu",)),
        Node("depthwise_norm", BatchNorm(4, 1e-5, 0.125), ("depthwise",)),
        Node("sum", Add(), ("depthwise_norm", "stem_relu")),
        Node("sum_relu", Relu(6.0), ("sum",)),
        Node("wide", Conv2d(4, 9, (2, 2), (2, 2), (0, 0), (1, 1), 1, True), ("sum_relu",)),
        Node("wide_relu", Relu(0.0), ("wide",)),
        Node("mean", GlobalAvgPool(), ("wide_relu",)),
        Node("flat", Flatten(), ("mean",)),
        Node("classes", Linear(9, 3, True), ("flat",)),
    )
    return place_quantizers(Graph("small", Input(3, 6, 5, 0.015625, 110), nodes, "classes"), 4)


def _side_tensor(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    part = name.rpartition(".")[2]
    center, spread = {"clip": (3.0, 0.5), "weight": (1.0, 0.2), "running_var": (1.0, 0.2)}.get(
        part, (0.0, 0.2)
    )
    return np.asarray(center + random.uniform(-spread, spread, shape), dtype=np.float32)
