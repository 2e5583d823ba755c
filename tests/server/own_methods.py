"""Methods of one's own, as a run.toml names them."""

from __future__ import annotations

from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import Recipe
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.graph import Graph


class Fickle(QuantizedMethod):
    """Deals other bit-widths whenever it is asked."""

    def __init__(self, graph: Graph, recipe: Recipe, seed: int) -> None:
        super().__init__(graph, recipe, seed)
        self._asked = 0

    def deal(self, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
        self._asked += 1
        return tuple(3 + (self._asked + layer) % 4 for layer in range(len(self.graph.layers)))


class Fixed(QuantizedMethod):
    """Deals what it was told to."""

    widths: dict[int, tuple[int, ...]]

    def deal(self, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
        return self.widths[client.client]


class Foreign:
    """Has what the protocol asks for, but not the grids that a server checks uploads against."""

    def __init__(self, graph: Graph, recipe: Recipe, seed: int) -> None:
        self._method = QuantizedMethod(graph, recipe, seed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._method, name)
