"""The global model of one round on its grids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import rounded_side
from fedmpq.method.recipe import Recipe
from fedmpq.method.state import GlobalModel
from fedmpq.model.batch_statistics import quantized_statistics
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import Layers, PackedLayer, QuantizedLayer, Side, Weights, dequantize_all


class RoundQuantizer:
    """The global model of one round on its grids, each layer at each bit-width quantized once."""

    def __init__(self, graph: Graph, weights: Weights, side: Side, recipe: Recipe) -> None:
        self._graph = graph
        self._weights = weights
        self._side = side
        self._recipe = recipe
        self._cache: dict[tuple[str, int], QuantizedLayer] = {}
        self._packed: dict[tuple[str, int], PackedLayer] = {}
        self._sides: dict[tuple[int, ...], Side] = {}
        self._sent_sides: dict[tuple[int, ...], Side] = {}
        self._errors: dict[tuple[int, int], float] = {}
        self._powers: dict[str, float] = {}

    def is_of(self, model: GlobalModel) -> bool:
        return self.has_weights_of(model) and self._side is model.side

    def has_weights_of(self, model: GlobalModel) -> bool:
        return self._weights is model.weights

    def share(self, other: RoundQuantizer) -> None:
        """Take over what one of the same weights has quantized: side tensors do not matter to it."""
        self._cache, self._packed = other._cache, other._packed
        self._errors, self._powers = other._errors, other._powers

    def layer(self, name: str, bits: int) -> QuantizedLayer:
        key = name, bits
        if key not in self._cache:
            self._cache[key] = QuantizedLayer.from_weights(
                self._weights[name], bits, self._recipe.step_rule, self._recipe.per_channel
            )
        return self._cache[key]

    def layers(self, widths: Sequence[int]) -> Layers:
        """The model at these bit-widths."""
        return {
            node.name: self.layer(node.name, b) for node, b in zip(self._graph.layers, widths, strict=True)
        }

    def packed(self, widths: Sequence[int]) -> dict[str, PackedLayer]:
        """The same as clients are sent it; those who are sent the same layer share it."""
        keys = [(node.name, bits) for node, bits in zip(self._graph.layers, widths, strict=True)]
        self._packed |= {key: self.layer(*key).pack() for key in keys if key not in self._packed}
        return {name: self._packed[name, bits] for name, bits in keys}

    def side(self, widths: tuple[int, ...]) -> Side:
        """The side tensors that go with the model at these bit-widths."""
        if self._recipe.statistics == "averaged":
            return self._side
        if widths not in self._sides:
            quantized = dequantize_all(self.layers(widths))
            self._sides[widths] = quantized_statistics(self._graph, self._weights, quantized, self._side)
        return self._sides[widths]

    def sent_side(self, widths: tuple[int, ...]) -> Side:
        """The same, rounded as clients are sent them; every upload is checked against it."""
        # One serves all bit-widths where the statistics stay: clients may be many, and each dealt its own.
        key = () if self._recipe.statistics == "averaged" else widths
        if key not in self._sent_sides:
            self._sent_sides[key] = rounded_side(self.side(widths), self._recipe.plan.side_bits)
        return self._sent_sides[key]

    def error(self, layer: int, bits: int) -> float:
        """`|W - Q_b(W)|^2 / |W|^2` of the layer of that index at `b` bits, found once.

        BatchNorm makes a layer's output indifferent to the size of its weights, so the relative error is what
        counts.
        """
        key = layer, bits
        if key not in self._errors:
            name = self._graph.layers[layer].name
            noise = self._weights[name] - self.layer(name, bits).weights()
            self._errors[key] = _power(noise) / self._power_of(name)
        return self._errors[key]

    def _power_of(self, name: str) -> float:
        if name not in self._powers:
            self._powers[name] = max(_power(self._weights[name]), 1e-30)
        return self._powers[name]

    def errors(self) -> NDArray[np.float64]:
        """`error` of every layer at 1..8 bits."""
        layers, widths = range(len(self._graph.layers)), range(1, MAX_BITS + 1)
        return np.array([[self.error(layer, bits) for bits in widths] for layer in layers], np.float64)


def _power(tensor: NDArray[np.float32]) -> float:
    return float(np.square(tensor, dtype=np.float64).sum())
