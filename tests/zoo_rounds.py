"""Rounds for `local_round`, of networks from the zoo with layers of mixed widths and random images."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from fedmpq.edge_client.data import Dataset
from fedmpq.model import zoo
from fedmpq.model.exchange import TrainingPlan
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.trace import initial_state, trace
from tests import local_round

MIXED_BITS = (8, 4, 3, 6, 2, 5)


def save_zoo_round(
    path: Path, model: str, shape: tuple[int, int, int], samples: int, plan: TrainingPlan
) -> None:
    """`shape` is that of an image: channels, height, width."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = zoo.build(model, classes=10, channels=shape[0])
    graph = trace(
        module,
        torch.zeros(1, *shape),
        name=model,
        activation_bits=4,
        input_scale=1 / 64,
        input_zero_point=110,
    )
    weights, side = initial_state(module, graph)
    layers = {
        name: QuantizedLayer.from_weights(weight, bits, "least_error", False)
        for (name, weight), bits in zip(weights.items(), cycle(MIXED_BITS), strict=False)
    }
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (samples, shape[1], shape[2], shape[0]), dtype=np.uint8)
    data = Dataset(images, random.integers(0, 10, samples), tuple("0123456789"))
    local_round.save(path, graph, layers, side, plan, data)
