"""Where the updates of a simulated round become the next model: here, or on the way here.

Rules that compare updates with one another need all of them, and sums of floating-point numbers need them in
the order of clients: they come here. A plain mean in whole numbers is the same in any grouping, so workers
that can sum by themselves do, and what comes here does not grow with the number of clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, cast

from fedmpq.exchange.float_messages import FloatAssignment
from fedmpq.exchange.messages import Assignment, bit_widths
from fedmpq.lab.pool import Pool, Returned, Sent, SummingPool, Trained
from fedmpq.lab.round_parts import counted_bytes
from fedmpq.method.protocol import Method
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.running_merge import PartialMerge
from fedmpq.method.state import GlobalModel

SentHere = TypeVar("SentHere", bound=Assignment | FloatAssignment, contravariant=True)


class Merging(Protocol[SentHere]):
    """One round's updates on their way into the next model."""

    def train(self, assignments: Sequence[SentHere]) -> Iterator[Trained]:
        """What is told of each client, as they are ready."""

    def merged(self) -> GlobalModel:
        """The next model, once all have trained."""


class MergedHere(Generic[Sent, Returned]):
    """All updates come here."""

    def __init__(
        self, method: Method[Sent, Returned], pool: Pool[Sent, Returned], model: GlobalModel
    ) -> None:
        self._method, self._pool, self._model = method, pool, model
        self._updates: list[Returned] = []

    def train(self, assignments: Sequence[Sent]) -> Iterator[Trained]:
        for update in self._pool.train(assignments):
            self._updates.append(update)
            # While others train.
            yield Trained(update.client, update.loss, counted_bytes(self._method.graph, update))

    def merged(self) -> GlobalModel:
        # They come as they are ready; a sum in that order would differ in its last bits from run to run.
        self._updates.sort(key=lambda update: update.client)
        return self._method.merge(self._model, self._updates)


class MergedOnTheWay:
    """Workers sum what their clients have changed, and one sum comes here."""

    def __init__(self, method: QuantizedMethod, pool: SummingPool, model: GlobalModel) -> None:
        self._method, self._pool, self._model = method, pool, model
        self._sum: PartialMerge | None = None

    def train(self, assignments: Sequence[Assignment]) -> Iterator[Trained]:
        dealt = {one.client: bit_widths(self._method.graph, one.layers) for one in assignments}
        for result in self._pool.train_summed(replace(self._model, dealt=dealt, average=None), assignments):
            if isinstance(result, Trained):
                yield result
            else:
                self._sum = result

    def merged(self) -> GlobalModel:
        assert self._sum is not None
        merging = self._method.begin(self._model)
        merging.take(self._sum)
        return merging.finish()


def merging(
    method: Method[Sent, Returned], pool: Pool[Sent, Returned], model: GlobalModel, clients: int
) -> Merging[Sent]:
    """On the way where the rule allows it and the workers sum the changes of so many clients."""
    in_parts = _summed_in_parts(method)
    if in_parts is not None and isinstance(pool, SummingPool) and pool.sums(clients):
        return cast("Merging[Sent]", MergedOnTheWay(in_parts, pool, model))
    return MergedHere(method, pool, model)


def _summed_in_parts(method: object) -> QuantizedMethod | None:
    """The method, if workers can sum updates as it does: they make the built-in one by themselves, and one of
    somebody's own may merge as it likes."""
    return method if type(method) is QuantizedMethod and method.sums_in_parts else None
