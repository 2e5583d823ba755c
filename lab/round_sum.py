"""What one worker of a simulation sums of a round, where updates are merged on their way."""

from __future__ import annotations

from collections.abc import Iterable

from fedmpq.exchange.messages import Update
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.pool import Trained
from fedmpq.lab.round_parts import counted_bytes
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.running_merge import PartialMerge
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph


class RoundSum:
    """The changes of some clients of a round, which is a plain mean in whole numbers."""

    def __init__(self, experiment: Experiment, graph: Graph, model: GlobalModel) -> None:
        """`model` is what they were sent, with their bit-widths: nothing is dealt here."""
        self._method = QuantizedMethod(graph, experiment.recipe(), experiment.seed)
        self._model = model
        self._merge = self._method.begin(model)

    def add(self, update: Update) -> Trained:
        """Take an update; what is told of it."""
        self._merge.add(update)
        return Trained(update.client, update.loss, counted_bytes(self._method.graph, update))

    def handed_on(self) -> PartialMerge:
        """The sum of what was added since the last."""
        partial, self._merge = self._merge.partial(), self._method.begin(self._model)
        return partial

    def combined(self, sums: Iterable[PartialMerge]) -> PartialMerge:
        """One of several, of distinct clients."""
        merge = self._method.begin(self._model)
        for each in sums:
            merge.take(each)
        return merge.partial()
