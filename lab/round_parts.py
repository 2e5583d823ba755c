"""What each client of a simulated round got and gave, in the bytes that a federation would count."""

from __future__ import annotations

from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update, bit_widths
from fedmpq.exchange.wire import sent_bytes
from fedmpq.lab.round_log import client_name
from fedmpq.method.history import ClientFacts
from fedmpq.model.graph import Graph


class RoundParts:
    """Counts the parts of a round's clients; what several are sent in common is counted once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[tuple[int, ...], int] = {}

    def part(self, sent: Assignment | FloatAssignment, bytes_up: int) -> ClientFacts:
        """The part of a client that gave back so many bytes; what it was sent lives as long as this."""
        return ClientFacts(
            sent.client,
            client_name(sent.client),
            "trained",
            bit_widths=_widths(self._graph, sent),
            bytes_up=bytes_up,
            bytes_down=self._sent_bytes(sent),
        )

    def _sent_bytes(self, assignment: Assignment | FloatAssignment) -> int:
        if isinstance(assignment, FloatAssignment):
            return counted_bytes(self._graph, assignment)
        key = id(assignment.side), *map(id, assignment.layers.values())
        if key not in self._found:
            self._found[key] = counted_bytes(self._graph, assignment)
        return self._found[key]


def _widths(graph: Graph, sent: Assignment | FloatAssignment) -> tuple[int, ...]:
    return () if isinstance(sent, FloatAssignment) else bit_widths(graph, sent.layers)


def counted_bytes(
    graph: Graph, message: Assignment | Update | Calibration | FloatAssignment | FloatUpdate
) -> int:
    """Full precision never crosses a real network here; its numbers count as they are."""
    if isinstance(message, FloatAssignment | FloatUpdate):
        return message.nbytes
    return sent_bytes(graph, message)
