"""The updates of a round as the blob store has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedmpq.exchange.messages import Update
from fedmpq.exchange.wire import decode_update
from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs
from fedmpq.server.store.records import Answer, Seat

Answers = Sequence[tuple[Seat, Answer]]
"""Who has answered, and what they gave back."""


@dataclass(frozen=True)
class StoredUpdates:
    """In the order of client numbers, read one at a time whenever they are gone through: a merge may do so
    more than once, and they need not be in memory together."""

    graph: Graph
    blobs: Blobs
    answers: Answers

    def __iter__(self) -> Iterator[Update]:
        for _, answer in self.answers:
            yield decode_update(self.graph, self.blobs.read(answer.payload))[1]
