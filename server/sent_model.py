"""The model that a round sends out, at every bit-width it was dealt at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import pack_layers
from fedmpq.exchange.wire import encode_model
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.server.statistics_bounds import statistics_bounds


class SentModel:
    """What clients are sent, and what their answers are checked against: in threads of their own, perhaps
    while the next model is in the making."""

    def __init__(self, graph: Graph, quantizer: RoundQuantizer) -> None:
        self._graph = graph
        self._quantizer = quantizer
        self._bounds: dict[tuple[int, ...], dict[str, NDArray[np.float64]]] = {}

    def layers(self, widths: tuple[int, ...]) -> Layers:
        return self._quantizer.layers(widths)

    def side(self, widths: tuple[int, ...]) -> Side:
        return self._quantizer.sent_side(widths)

    def payload(self, widths: tuple[int, ...]) -> bytes:
        """What `QuantizedMethod.assign` or `.calibration` sends, as bytes."""
        return encode_model(self._graph, pack_layers(self.layers(widths)), self.side(widths))

    def statistics_bounds(self, widths: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
        """How large the statistics of the model at these bit-widths can be; many boards have the same."""
        if widths not in self._bounds:
            self._bounds[widths] = statistics_bounds(self._graph, self.layers(widths), self.side(widths))
        return self._bounds[widths]
