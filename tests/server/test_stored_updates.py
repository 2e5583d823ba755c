"""The updates of a round as they are stored: how often a merge reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.exchange.wire import encode_update
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.recipe import fedmpq
from fedmpq.method.robust import Aggregation
from fedmpq.method.state import ClientRecord
from fedmpq.server.blobs import FolderBlobs
from fedmpq.server.store.records import Answer, Seat
from fedmpq.server.stored_updates import StoredUpdates
from tests.server.loopback import update_of
from tests.server.small_model import GRAPH, first_state


class CountingBlobs(FolderBlobs):
    """A folder of blobs that counts what is read."""

    read_so_far = 0

    def read(self, name: bytes) -> bytes:
        self.read_so_far += 1
        return super().read(name)


@pytest.mark.parametrize("rule", ["mean", "agreement", "median", "krum"])
def test_a_merge_and_its_facts_read_every_update_once(tmp_path: Path, rule: Aggregation) -> None:
    method = QuantizedMethod(GRAPH, replace(fedmpq("best", TrainingPlan()), aggregation=rule), 0)
    clients = [ClientRecord(n, 4.0, 30 + n) for n in range(4)]
    model = method.start(*first_state(0), clients)
    blobs, updates = CountingBlobs(tmp_path), [update_of(method, model, client) for client in clients]
    answers = []
    for client, update in zip(clients, updates, strict=True):
        data = encode_update(GRAPH, "r", update)
        answer = Answer(blobs.put(data), len(data), "receipt")
        answers.append((Seat(client.client, method.deal(model, client), b"", 0, answer=answer), answer))
    stored = StoredUpdates(GRAPH, blobs, answers)
    merged = method.merge(model, stored)
    told = stored.told()
    assert blobs.read_so_far == 4
    assert [(one.client, one.samples, one.loss, one.evaluation) for one in told] == [
        (one.client, one.samples, one.loss, one.evaluation) for one in updates
    ]
    assert not any(one.layers or one.side for one in told)
    expected = method.merge(model, updates)
    assert all(merged.weights[name].tobytes() == w.tobytes() for name, w in expected.weights.items())


def test_what_a_merge_has_not_read_is_read_for_its_facts(tmp_path: Path) -> None:
    method = QuantizedMethod(GRAPH, fedmpq("best", TrainingPlan()), 0)
    client = ClientRecord(3, 4.0, 30)
    model = method.start(*first_state(0), [client])
    blobs, update = CountingBlobs(tmp_path), update_of(method, model, client)
    data = encode_update(GRAPH, "r", update)
    answer = Answer(blobs.put(data), len(data), "receipt")
    stored = StoredUpdates(GRAPH, blobs, [(Seat(3, (4, 4, 4), b"", 0, answer=answer), answer)])
    assert [one.samples for one in stored.told()] == [30]
    assert [one.samples for one in stored.told()] == [30]
    assert blobs.read_so_far == 1
