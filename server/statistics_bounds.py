"""How large BatchNorm's statistics of a quantized model can be, whatever the images.

A BatchNorm reads `y = s_x s_w sum w_int x + bias` of the layer before it, `x` being codes of at most `X` in
magnitude. With `A = s_x s_w X sum |w_int|`, per output channel, every `y` is within `A` of `bias`. So

    |mean| <= A + |bias|,        var <= A^2

of any images, and of any average over batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.calibration import STATISTICS
from fedmpq.model.graph import Graph, Node
from fedmpq.model.integer_program import FoldedProduct, Step, Vector, compile_program
from fedmpq.model.quantized import Layers, Side

ALLOWANCE = 1.01
"""Half precision rounds to one part in 2048, and float32 products to much less."""
LEAST = 1e-6
"""Beside zero: half precision has steps of 2^-24 there."""


@dataclass(frozen=True)
class _Bounds:
    graph_side: Side
    found: dict[str, NDArray[np.float64]]

    def note(self, node: Node, product: FoldedProduct, _: list[Step]) -> tuple[Vector, Vector]:
        """Called in the place of a BatchNorm's statistics, which do not matter here."""
        weights = np.abs(product.weight.astype(np.int64)).reshape(len(product.weight), -1).sum(axis=1)
        scale = np.abs(product.weight_scale.astype(np.float64)) * float(product.input.scale)
        reach = scale * product.input.bound * weights
        mean, variance = (f"{node.name}.{part}" for part in STATISTICS)
        self.found[mean] = ALLOWANCE * (reach + np.abs(product.offset)) + LEAST
        self.found[variance] = np.square(ALLOWANCE * reach + LEAST)
        return self.graph_side[mean], self.graph_side[variance]


def statistics_bounds(graph: Graph, layers: Layers, side: Side) -> dict[str, NDArray[np.float64]]:
    """By side tensor: the greatest magnitude that each mean and variance of the model can have."""
    bounds = _Bounds(side, {})
    compile_program(graph, layers, side, bounds.note)
    return bounds.found
