"""A trained `torch.nn.Module` as a graph and its tensors, whatever normalisation it was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.post_training import FloatModel, QuantizeError
from fedmpq.model.first_model import ImageFormat, traced_graph
from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, Graph, Linear, Node
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from torch import nn

DEFAULT_ACTIVATION_BITS = 8
PIXELS = 255.0


@dataclass(frozen=True)
class Normalisation:
    """What the network was trained on: `(a / 255 - mean) / std` for pixels `a` in 0..255, per channel or not.

    The default is what torchvision's `ToTensor` gives.
    """

    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0

    def per_channel(self, channels: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and deviation of each channel; lists of another length are refused."""
        found = []
        for name, given in (("mean", self.mean), ("std", self.std)):
            values = np.asarray(given, np.float64)
            if values.shape not in ((), (channels,)):
                raise QuantizeError(f"{name} has shape {values.shape}; the network takes {channels} channels")
            if not np.isfinite(values).all() or (name == "std" and not (values > 0).all()):
                raise QuantizeError(f"{name} = {given}; it must be finite{', and above 0' * (name == 'std')}")
            found.append(np.broadcast_to(values, (channels,)))
        return found[0], found[1]


def read_network(
    module: nn.Module,
    shape: tuple[int, int, int],
    normalisation: Normalisation,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    task: Task = CLASSIFICATION,
) -> FloatModel:
    """The module's graph for images `(height, width, channels)`, and its tensors.

    A graph's image has one scale `s` and one zero point `z`. A normalisation per channel `c` is the same up
    to a factor and an offset,

        (a / 255 - mean_c) / std_c = f_c s (a - z) + o_c,

    which go into the first layer: its weights times `f_c`, and `sum w o_c` into its bias or the mean of the
    BatchNorm behind it. Under padding, which is real 0, the offset is not exact; it is at most half a pixel
    value where all channels have one mean.
    """
    height, width, channels = shape
    mean, std = normalisation.per_channel(channels)
    zero_point = int(np.clip(np.rint(mean.mean() * PIXELS), 0, 255))
    scale = float(np.float32(1.0 / (PIXELS * std.mean())))
    image = ImageFormat(height, width, channels, scale, zero_point)
    graph = traced_graph(type(module).__name__, module, image, activation_bits, task)
    weights, side = initial_state(module, graph)
    factors = 1.0 / (PIXELS * std * scale)
    offsets = (zero_point / PIXELS - mean) / std
    if not np.allclose(factors, 1.0, rtol=1e-6) or not np.allclose(offsets, 0.0, atol=1e-6):
        weights, side = _folded(graph, weights, side, factors, offsets)
    return FloatModel(graph, weights, side)


def _folded(
    graph: Graph, weights: Weights, side: Side, factors: NDArray[np.float64], offsets: NDArray[np.float64]
) -> tuple[Weights, Side]:
    first = _first_layer(graph)
    old = weights[first.name].astype(np.float64)
    shift = (old * offsets[None, :, None, None]).sum(axis=(1, 2, 3))
    new = (old * factors[None, :, None, None]).astype(np.float32)
    return {**weights, first.name: new}, {**side, **_shifted(graph, first, side, shift)}


def _first_layer(graph: Graph) -> Node:
    """The one convolution that reads the image."""
    readers = [graph.by_name[name] for name in graph.consumers[INPUT]]
    if len(readers) == 1 and isinstance(readers[0].op, Conv2d) and readers[0].op.groups == 1:
        return readers[0]
    raise QuantizeError(
        "only one ungrouped convolution that reads the image can take a mean and std of its own per channel; "
        f"here {', '.join(type(node.op).__name__ for node in readers)} does: give one mean and std for all, "
        "with a mean that is a whole number of pixel values (such as 128 / 255)"
    )


def _shifted(graph: Graph, first: Node, side: Side, shift: NDArray[np.float64]) -> Side:
    """The side tensor that takes the offset of the first layer's sums."""
    assert isinstance(first.op, Conv2d | Linear)
    if first.op.bias:
        name = f"{first.name}.bias"
        return {name: (side[name] + shift).astype(np.float32)}
    for reader in graph.consumers[first.name]:
        if isinstance(graph.by_name[reader].op, BatchNorm):
            name = f"{reader}.running_mean"
            return {name: (side[name] - shift).astype(np.float32)}
    raise QuantizeError(
        f"layer {first.name!r} has neither a bias nor a BatchNorm behind it to take the mean of the images; "
        "give it a bias"
    )
