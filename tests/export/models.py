"""Networks of the zoo with BatchNorm as training leaves it, negative factors and dead channels included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpq.model import zoo
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import QuantizedLayer, Side, Weights
from fedmpq.model.trace import trace

SIZES = {"digits_cnn": 8, "resnet8": 16, "resnet20": 16, "resnet44": 8, "resnet18": 32, "mobilenet_v2": 32}
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
