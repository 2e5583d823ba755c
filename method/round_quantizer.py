"""The global model of one round on its grids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import rounded_side
from fedmpq.method.pruning_growing import deal_best
from fedmpq.method.recipe import Recipe
from fedmpq.method.state import GlobalModel
from fedmpq.model.batch_statistics import quantized_statistics
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS, STEP_RULES, least_errors, noise_power, quantize
from fedmpq.model.quantized import Layers, PackedLayer, QuantizedLayer, Side, Weights, dequantize_all
from fedmpq.system.machine import available_cores

# Layers up to so many times the size of one that a deal asks for are looked at with it.
_ALIKE = 1.5


class RoundQuantizer:
    """The global model of one round on its grids, each layer at each bit-width quantized once."""

    def __init__(self, graph: Graph, weights: Weights, side: Side, recipe: Recipe) -> None:
        self._graph = graph
        self._weights = weights
        self._side = side
        self._recipe = recipe
        self._steps: dict[tuple[str, int], NDArray[np.float32]] = {}
        self._cache: dict[tuple[str, int], QuantizedLayer] = {}
        self._packed: dict[tuple[str, int], PackedLayer] = {}
        self._sides: dict[tuple[int, ...], Side] = {}
        self._sent_sides: dict[tuple[int, ...], Side] = {}
        self._noise: dict[tuple[str, int], float] = {}
        self._errors: dict[tuple[int, int], float] = {}
        self._powers: dict[str, float] = {}
        self._deals: dict[float, tuple[int, ...]] = {}

    def is_of(self, model: GlobalModel) -> bool:
        return self.has_weights_of(model) and self._side is model.side

    def has_weights_of(self, model: GlobalModel) -> bool:
        return self._weights is model.weights

    def share(self, other: RoundQuantizer) -> None:
        """Take over what one of the same weights has quantized: side tensors do not matter to it."""
        self._steps, self._cache, self._packed = other._steps, other._cache, other._packed
        self._noise, self._errors = other._noise, other._errors
        self._powers, self._deals = other._powers, other._deals

    def layer(self, name: str, bits: int) -> QuantizedLayer:
        key = name, bits
        if key not in self._cache:
            weights, step = self._weights[name], self._step(name, bits)
            self._cache[key] = QuantizedLayer(quantize(weights, step, bits), bits, step)
        return self._cache[key]

    def _step(self, name: str, bits: int) -> NDArray[np.float32]:
        key = name, bits
        if key not in self._steps:
            self._find([key])
        return self._steps[key]

    def _find(self, keys: Sequence[tuple[str, int]]) -> None:
        """The steps of these layers at these bit-widths, and what they leave of error, all at once."""
        recipe = self._recipe
        new = [key for key in keys if key not in self._steps]
        if recipe.step_rule == "least_error":
            # The largest first, so that no core is left with one at the end.
            new.sort(key=lambda key: -self._weights[key[0]].size)
            found = least_errors(self._weights, new, recipe.per_channel, available_cores()) if new else []
            for key, (step, noise) in zip(new, found, strict=True):
                self._steps[key], self._noise[key] = step, noise
            return
        for name, bits in new:
            self._steps[name, bits] = STEP_RULES[recipe.step_rule](
                self._weights[name], bits, recipe.per_channel
            )

    def layers(self, widths: Sequence[int]) -> Layers:
        """The model at these bit-widths."""
        keys = [(node.name, bits) for node, bits in zip(self._graph.layers, widths, strict=True)]
        self._find(keys)
        return {name: self.layer(name, bits) for name, bits in keys}

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

    def dealt(self, budget: float) -> tuple[int, ...]:
        """The bit-widths of least error within the budget, found once for all clients that have it."""
        if budget not in self._deals:
            # What every deal asks for of most layers; of some it asks for more.
            common = range(min(2, int(budget)), min(MAX_BITS, int(budget) + 1) + 1)
            self._find([(node.name, bits) for node in self._graph.layers for bits in common])
            self._deals[budget] = deal_best(self._graph.layer_sizes, self.error, budget)
        return self._deals[budget]

    def error(self, layer: int, bits: int) -> float:
        """`|W - Q_b(W)|^2 / |W|^2` of the layer of that index at `b` bits, found once.

        BatchNorm makes a layer's output indifferent to the size of its weights, so the relative error is what
        counts.
        """
        if (layer, bits) not in self._errors:
            name = self._graph.layers[layer].name
            if (name, bits) not in self._steps:
                self._find(self._asked_next(layer, bits))
            self._errors[layer, bits] = self._noise_of(name, bits) / self._power_of(name)
        return self._errors[layer, bits]

    def _asked_next(self, layer: int, bits: int) -> list[tuple[str, int]]:
        """The layer at `b` bits, and others at the same that a deal likely asks for soon: it gives bits where
        they cost little. To find many at once takes less time than one after the other."""
        sizes = self._graph.layer_sizes
        names = [node.name for node in self._graph.layers]
        others = [name for name, size in zip(names, sizes, strict=True) if size <= _ALIKE * sizes[layer]]
        return [(name, bits) for name in others]

    def _noise_of(self, name: str, bits: int) -> float:
        key, step = (name, bits), self._step(name, bits)
        if key not in self._noise:
            self._noise[key] = noise_power(self._weights[name], step, bits)
        return self._noise[key]

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
