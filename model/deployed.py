"""A model as a board runs it: the graph, the codes at their bit-widths, and the side tensors for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.model import integer_forward
from fedmpq.model.graph import Graph
from fedmpq.model.integer_program import IntegerProgram, compile_program
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import Layers, Side, average_bits


@dataclass(frozen=True)
class DeployedModel:
    """An integer model with all that inference and export need."""

    graph: Graph
    layers: Layers
    side: Side
    class_names: tuple[str, ...] = ()
    """The label of each output; empty where the labels have no names."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from, such as its run and round, for the card of an exported file."""

    @property
    def bit_widths(self) -> dict[str, int]:
        """The bits of each layer's weights, in the order of the graph."""
        return {node.name: self.layers[node.name].bits for node in self.graph.layers}

    @property
    def bits_per_weight(self) -> float:
        """The mean over all weights: what a budget bounds."""
        return average_bits(tuple(self.bit_widths.values()), self.graph.layer_sizes)

    @cached_property
    def program(self) -> IntegerProgram:
        """The integer operations, with BatchNorm and scales folded into biases and multipliers."""
        return compile_program(self.graph, self.layers, self.side)

    def logits(self, images: NDArray[np.uint8], *, threads: int = 1) -> NDArray[np.float32]:
        """Logits `(N, classes)` of uint8 images `(N, H, W, C)`, to the bit what exported files compute."""
        products = partial(native_products, threads=threads)
        return integer_forward.logits(self.program, images, products=products)

    def predict(self, images: NDArray[np.uint8], *, threads: int = 1) -> NDArray[np.int64]:
        """The label of each image; `class_names` has what they are called."""
        labels: NDArray[np.int64] = self.logits(images, threads=threads).argmax(axis=1)
        return labels

    def accuracy(
        self, images: NDArray[np.uint8], labels: NDArray[np.integer[Any]], *, threads: int = 1
    ) -> float:
        """The share of the images that get their label."""
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images but {len(labels)} labels; give one label for each image")
        if len(images) == 0:
            raise ValueError("there are no images to measure an accuracy on; give at least one")
        return float(np.mean(self.predict(images, threads=threads) == labels))
