"""The updates of a round as the blob store has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedmpq.exchange.messages import Update
from fedmpq.exchange.wire import decode_update
from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs
from fedmpq.server.held_updates import HeldUpdates
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
    held: HeldUpdates = field(default_factory=HeldUpdates)
    """Those that are in memory already."""
    _told: dict[int, Update] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Update]:
        for seat, answer in self.answers:
            update = self.held.get(answer.payload) or self._read(answer.payload)
            self._told[seat.client] = replace(update, layers={}, side={})
            yield update

    def _read(self, name: bytes) -> Update:
        return decode_update(self.graph, self.blobs.read(name))[1]

    def told(self) -> list[Update]:
        """All of them without layers and side tensors; what has been gone through is not read again."""
        if len(self._told) < len(self.answers):
            for _ in self:
                pass
        return [self._told[seat.client] for seat, _ in self.answers]
