"""Methods of one's own, as a run.toml names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from fedmpq.exchange.messages import Update
from fedmpq.method.buffered_merge import BufferedMerge, Version
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import Recipe
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Weights
from fedmpq.model.state_checks import ProgramError

BAD = 666.0


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


class Picky(QuantizedMethod):
    """Merges nothing that has the loss `BAD` in it, and in the second round nothing at all so many times."""

    failures: int = 0

    def merge(self, model: GlobalModel, updates: Iterable[Update]) -> GlobalModel:
        every = list(updates)
        if model.round == 1 and Picky.failures > 0:
            Picky.failures -= 1
            raise ZeroDivisionError("nothing can be merged now")
        if any(update.loss == BAD for update in every):
            raise ProgramError("a scale is not finite")
        return super().merge(model, every)


class PickyBuffer(QuantizedMethod):
    """The same for changes of several versions, and nothing at all so many times."""

    failures: int = 0

    def buffer(self, model: GlobalModel, versions: Mapping[int, Version]) -> BufferedMerge:
        known = {number: self._merging(each.model, each.quantizer) for number, each in versions.items()}
        return _PickyMerge(self._merging(model), known)


class _PickyMerge(BufferedMerge):
    def add(self, update: Update) -> None:
        if update.loss == BAD:
            raise ProgramError("a scale is not finite")
        super().add(update)

    def finish(self) -> GlobalModel:
        if PickyBuffer.failures > 0:
            PickyBuffer.failures -= 1
            raise ZeroDivisionError("nothing can be merged now")
        return super().finish()


class Tainting(QuantizedMethod):
    """Remembers which models were made of something with the loss `BAD`."""

    tainted: ClassVar[list[Weights]] = []

    def merge(self, model: GlobalModel, updates: Iterable[Update]) -> GlobalModel:
        every = list(updates)
        merged = super().merge(model, every)
        if any(update.loss == BAD for update in every):
            Tainting.tainted.append(merged.weights)
        return merged


class Foreign:
    """Has what the protocol asks for, but not the grids that a server checks uploads against."""

    def __init__(self, graph: Graph, recipe: Recipe, seed: int) -> None:
        self._method = QuantizedMethod(graph, recipe, seed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._method, name)
