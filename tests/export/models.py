"""Networks of the zoo with BatchNorm as training leaves it, negative factors and dead channels included; and
one such as a user may write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpq.model import zoo
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import (
    INPUT,
    AvgPool,
    Conv2d,
    Flatten,
    Graph,
    Input,
    Linear,
    MaxPool,
    Node,
    Relu,
)
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import QuantizedLayer, Side, Weights
from fedmpq.model.quantizers import place_quantizers
from fedmpq.model.trace import trace

SIZES = {
    "digits_cnn": 8,
    "resnet8": 16,
    "resnet20": 16,
    "resnet44": 8,
    "resnet18": 32,
    "mobilenet_v2": 32,
    "ds_cnn": 24,
    "mobilenet_v3_small": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
}
CLASSES = ("zero", "one", "two", "three", "four", "five", "six")


@cache
def traced(name: str, activation_bits: int = 4, channels: int = 3) -> tuple[Graph, Weights, Side]:
    torch.manual_seed(0)
    module = zoo.build(name, classes=len(CLASSES), channels=channels)
    example = torch.zeros(1, channels, SIZES[name], SIZES[name])
    graph = trace(
        module,
        example,
        name=name,
        input_scale=1 / 64,
        input_zero_point=120,
        activation_bits=activation_bits,
    )
    return graph, *initial_state(module, graph)


def scattered(side: Side, seed: int) -> Side:
    random = np.random.default_rng(seed)
    made = {}
    for name, tensor in side.items():
        part = name.rsplit(".", 1)[1]
        drawn: NDArray[np.floating]
        if part == "running_var":
            drawn = tensor * np.exp(random.normal(0, 1, tensor.shape))
        elif part == "weight":
            drawn = random.normal(0.5, 1, tensor.shape) * (random.random(tensor.shape) > 0.1)
        elif part == "clip":
            drawn = tensor * np.exp(random.normal(0, 0.3))
        else:
            drawn = random.normal(0, 0.5, tensor.shape)
        made[name] = np.asarray(drawn, np.float32)
    return made


def deployed(
    name: str, widths: Sequence[int], seed: int = 0, per_channel: bool = False, activation_bits: int = 4
) -> DeployedModel:
    """`widths` are repeated as often as there are layers."""
    graph, weights, side = traced(name, activation_bits)
    layers = {
        node.name: QuantizedLayer.from_weights(
            weights[node.name], widths[number % len(widths)], "max", per_channel
        )
        for number, node in enumerate(graph.layers)
    }
    return DeployedModel(graph, layers, scattered(side, seed), CLASSES, {"run": "test", "round": 3})


def users_graph() -> Graph:
    """Pools with padding, groups, dilation, strides of their own, linear layers inside, a ReLU of codes."""
    nodes = (
        Node("a", Conv2d(2, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, True), (INPUT,)),
        Node("ra", Relu(0.0), ("a",)),
        Node("mp", MaxPool((3, 2), (2, 1), (1, 1)), ("ra",)),
        Node("ap", AvgPool((3, 3), (2, 1), (1, 1)), ("mp",)),
        Node("flat", Flatten(), ("ap",)),
        Node("l1", Linear(6 * 2 * 7, 9, True), ("flat",)),
        Node("r1", Relu(6.0), ("l1",)),
        Node("l2", Linear(9, 5, False), ("r1",)),
        Node("l3", Linear(5, len(CLASSES), True), ("l2",)),
    )
    return place_quantizers(Graph("users", Input(2, 9, 8, 0.5, 30), nodes, "l3"), 5)


def users_model(seed: int = 0) -> DeployedModel:
    graph, random = users_graph(), np.random.default_rng(seed)
    layers = {
        node.name: QuantizedLayer.from_weights(
            random.normal(size=graph.weight_shape(node.name)).astype(np.float32), 3 + number, "max", True
        )
        for number, node in enumerate(graph.layers)
    }
    side = {
        name: np.asarray(random.uniform(0.5, 3, shape), np.float32)
        for name, shape in graph.side_shapes().items()
    }
    return DeployedModel(graph, layers, side, CLASSES)
