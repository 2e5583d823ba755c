"""The model that a round sends out, at every bit-width it was dealt at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import pack_layers
from fedmpq.exchange.wire import encode_model
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.server.blobs import Outgoing
from fedmpq.server.statistics_bounds import statistics_bounds


class SentModel:
    """What clients are sent, and what their answers are checked against: in threads of their own, perhaps
    while the next model is in the making."""

    def __init__(self, graph: Graph, quantizer: RoundQuantizer) -> None:
        self._graph = graph
        self._quantizer = quantizer
        self._bounds: dict[tuple[int, ...], dict[str, NDArray[np.float64]]] = {}
        self._plain: dict[bytes, tuple[bytes, int]] = {}

    def layers(self, widths: tuple[int, ...]) -> Layers:
        return self._quantizer.layers(widths)

    def side(self, widths: tuple[int, ...]) -> Side:
        return self._quantizer.sent_side(widths)

    def payload(self, widths: tuple[int, ...], *, coded: bool = True) -> bytes:
        """What `QuantizedMethod.assign` or `.calibration` sends, as bytes."""
        return encode_model(self._graph, pack_layers(self.layers(widths)), self.side(widths), coded=coded)

    def offer(self, widths: tuple[int, ...], outgoing: Outgoing) -> tuple[bytes, int]:
        """The name and length of the payload that is there to be downloaded from now on, layers coded; beside
        it there is the same with planes, for boards of versions that read no codes."""
        layers, side = pack_layers(self.layers(widths)), self.side(widths)
        data, plain = (encode_model(self._graph, layers, side, coded=coded) for coded in (True, False))
        name = outgoing.put(data)
        self._plain[name] = outgoing.put(plain), len(plain)
        return name, len(data)

    def offer_again(self, name: bytes, widths: tuple[int, ...], outgoing: Outgoing) -> bool:
        """Whether the payload of that name could be made again: one that was offered so, or by a version that
        knew only planes."""
        made, _ = self.offer(widths, outgoing)
        return name in (made, self._plain[made][0])

    def plain(self, name: bytes) -> tuple[bytes, int] | None:
        """The name and length of the same payload with planes; None: that one has planes."""
        return self._plain.get(name)

    def statistics_bounds(self, widths: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
        """How large the statistics of the model at these bit-widths can be; many boards have the same."""
        if widths not in self._bounds:
            self._bounds[widths] = statistics_bounds(self._graph, self.layers(widths), self.side(widths))
        return self._bounds[widths]
