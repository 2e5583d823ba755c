"""A small model that the server's tests run rounds of: two convolutions and a classifier."""

from __future__ import annotations

import numpy as np

from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, Flatten, Graph, Input, Linear, Node, Relu
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.quantizers import place_quantizers


def _graph() -> Graph:
    nodes = (
        Node("conv1", Conv2d(1, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1, False), (INPUT,)),
        Node("bn1", BatchNorm(6, 1e-5, 0.125), ("conv1",)),
        Node("relu", Relu(0.0), ("bn1",)),
        Node("conv2", Conv2d(6, 4, (3, 3), (2, 2), (0, 0), (1, 1), 1, False), ("relu",)),
        Node("bn2", BatchNorm(4, 1e-5, 0.125), ("conv2",)),
        Node("relu2", Relu(0.0), ("bn2",)),
        Node("flat", Flatten(), ("relu2",)),
        Node("fc", Linear(36, 5, True), ("flat",)),
    )
    return place_quantizers(Graph("small", Input(1, 8, 8, 0.015625, 128), nodes, "fc"), 4)


GRAPH = _graph()


def first_state(seed: int = 0) -> tuple[Weights, Side]:
    """Random weights, and side tensors around 1."""
    random = np.random.default_rng(seed)
    weights = {
        node.name: random.normal(0, 0.3, GRAPH.weight_shape(node.name)).astype(np.float32)
        for node in GRAPH.layers
    }
    side = {
        name: np.asarray(random.uniform(0.5, 1.5, shape), np.float32)
        for name, shape in GRAPH.side_shapes().items()
    }
    return weights, side
