"""What a merge finds in memory: as much as fits, and nothing that was not checked."""

from __future__ import annotations

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import fedmpq
from fedmpq.method.state import ClientRecord
from fedmpq.server.held_updates import HeldUpdates
from tests.server.loopback import update_of
from tests.server.small_model import GRAPH, first_state


def test_updates_are_held_while_there_is_room() -> None:
    method = QuantizedMethod(GRAPH, fedmpq("best", TrainingPlan()), 0)
    clients = [ClientRecord(n, 4.0, 30) for n in range(3)]
    model = method.start(*first_state(0), clients)
    updates = [update_of(method, model, client) for client in clients]
    held = HeldUpdates(2 * updates[0].nbytes)
    for number in (0, 0, 1, 2):
        held.keep(bytes([number]), updates[number])
    assert held.get(b"\0") is updates[0]
    assert held.get(b"\1") is updates[1]
    assert held.get(b"\2") is None
