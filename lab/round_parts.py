"""What each client of a simulated round got and gave, in the bytes that a federation would count."""

from __future__ import annotations

from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.exchange.wire import sent_bytes
from fedmpq.lab.round_log import client_name
from fedmpq.method.history import ClientFacts
from fedmpq.model.graph import Graph


def part_of(graph: Graph, sent: Assignment | FloatAssignment, returned: Update | FloatUpdate) -> ClientFacts:
    """One client's part in a round."""
    layers = [sent.layers[node.name] for node in graph.layers] if isinstance(sent, Assignment) else []
    return ClientFacts(
        returned.client,
        client_name(returned.client),
        "trained",
        bit_widths=tuple(layer.bits for layer in layers),
        bytes_up=counted_bytes(graph, returned),
        bytes_down=counted_bytes(graph, sent),
    )


def counted_bytes(
    graph: Graph, message: Assignment | Update | Calibration | FloatAssignment | FloatUpdate
) -> int:
    """Full precision never crosses a real network here; its numbers count as they are."""
    if isinstance(message, FloatAssignment | FloatUpdate):
        return message.nbytes
    return sent_bytes(graph, message)
