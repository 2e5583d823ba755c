"""What every rival trains: a model with mixed bit-widths and a few batches; storable for another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan, UpdateRule
from fedmpq.method.pruning_growing import deal_best
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, average_bits
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import Batch, Engine

if TYPE_CHECKING:
    import torch

Train = Callable[[int], object]
"""Trains that many steps."""

MODELS = {
    "resnet20": (3, 32, 32),
    "resnet44": (3, 32, 32),
    "mobilenet_v2": (3, 64, 64),
    "mobilenet_v3_small": (3, 224, 224),
    "ds_cnn": (1, 49, 10),
    "inertial_cnn": (6, 1, 128),
}
"""Channels, height and width of what they are fed. MobileNetV2 halves images five times, and BatchNorm in a
batch of one needs more than one pixel in the end: torch refuses 32."""
IMAGE = (3, 32, 32)
"""Of every other model."""
BATCHES = (1, 16, 64)
BUDGET = 4
CLASSES = 10
INPUT_SCALE, INPUT_ZERO_POINT = 1 / 64, 120
LEARNING_RATE = 0.01
DISTINCT_BATCHES = 4


@dataclass(frozen=True)
class Workload:
    """`graph.name` is the model's name in the zoo."""

    graph: Graph
    layers: Layers
    side: Side
    batches: tuple[Batch, ...]

    @property
    def bit_widths(self) -> tuple[int, ...]:
        return tuple(self.layers[node.name].bits for node in self.graph.layers)

    @property
    def bits(self) -> str:
        widths = self.bit_widths
        return (
            f"{min(widths)} to {max(widths)}, {average_bits(widths, self.graph.layer_sizes):.2f} on average"
        )

    def save(self, path: Path) -> None:
        arrays: dict[str, NDArray[np.generic]] = {
            "graph": np.frombuffer(self.graph.to_bytes(), np.uint8),
            "images": np.stack([images for images, _ in self.batches]),
            "labels": np.stack([labels for _, labels in self.batches]),
        }
        for name, layer in self.layers.items():
            arrays[f"codes {name}"], arrays[f"step {name}"] = layer.codes, layer.step
            arrays[f"bits {name}"] = np.asarray(layer.bits)
        arrays.update({f"side {name}": tensor for name, tensor in self.side.items()})
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> Workload:
        with np.load(path) as stored:
            graph = Graph.from_bytes(stored["graph"].tobytes())
            names = [node.name for node in graph.layers]
            layers = {
                name: QuantizedLayer(
                    stored[f"codes {name}"], int(stored[f"bits {name}"]), stored[f"step {name}"]
                )
                for name in names
            }
            side = {name: stored[f"side {name}"] for name in graph.side_shapes()}
            batches = tuple(zip(stored["images"], stored["labels"], strict=True))
        return cls(graph, layers, side, batches)


def dealt_bits(sizes: tuple[int, ...], budget: float = BUDGET) -> tuple[int, ...]:
    """The widths a server deals when every layer's relative error falls by four with each bit."""
    return deal_best(sizes, np.tile(4.0 ** -np.arange(1, 9), (len(sizes), 1)), budget)


def make_workload(model: str, batch: int) -> Workload:
    """A model of the zoo, quantized, and random images with random labels; needs torch."""
    graph, layers, side = _quantized_model(model)
    return Workload(graph, layers, side, random_batches(graph, batch))


def random_batches(graph: Graph, batch: int) -> tuple[Batch, ...]:
    """A few of random images with random labels."""
    random = np.random.default_rng(0)
    channels, height, width = graph.input.shape
    images = random.integers(0, 256, (DISTINCT_BATCHES, batch, height, width, channels), dtype=np.uint8)
    labels = random.integers(0, CLASSES, (DISTINCT_BATCHES, batch))
    return tuple(zip(images, labels, strict=True))


@cache
def _quantized_model(model: str) -> tuple[Graph, Layers, Side]:
    import torch

    from fedmpq.model import zoo

    torch.manual_seed(0)
    shape = MODELS.get(model, IMAGE)
    return quantized(zoo.build(model, classes=CLASSES, channels=shape[0]), model, shape)


def quantized(
    module: torch.nn.Module, name: str, shape: tuple[int, int, int], budget: float = BUDGET
) -> tuple[Graph, Layers, Side]:
    """The network as it is, for images of (channels, height, width), at the bits of a client's budget."""
    import torch

    from fedmpq.model.module_input import as_taken
    from fedmpq.model.module_state import initial_state
    from fedmpq.model.trace import trace

    example = as_taken(module, torch.zeros(1, *shape))
    graph = trace(module, example, name=name, input_scale=INPUT_SCALE, input_zero_point=INPUT_ZERO_POINT)
    weights, side = initial_state(module, graph)
    widths = zip(graph.layers, dealt_bits(graph.layer_sizes, budget), strict=True)
    layers = {
        node.name: QuantizedLayer.from_weights(weights[node.name], bits, "max", False)
        for node, bits in widths
    }
    return graph, layers, side


def engine_trainer(engine: Engine, work: Workload, update: UpdateRule) -> Train:
    """Steps of one of this project's engines."""
    plan = TrainingPlan(update=update, learning_rate=LEARNING_RATE)
    engine.load(work.graph, work.layers, work.side, plan, Draws(seed=0, client=0, round=1))
    batches = cycle(work.batches)
    return lambda steps: engine.train_epoch(islice(batches, steps))
