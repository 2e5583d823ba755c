"""The payloads of a round: coded for boards that read codes, with planes for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.exchange.wire import decode_model
from fedmpq.method.recipe import fedmpq
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.model.graph import INPUT, Flatten, Graph, Input, Linear, Node
from fedmpq.server.blobs import Outgoing
from fedmpq.server.sent_model import SentModel

GRAPH = Graph(
    "wide",
    Input(2, 8, 8, 1.0, 0),
    (Node("flat", Flatten(), (INPUT,)), Node("fc", Linear(128, 40, bias=True), ("flat",))),
    "fc",
)
WIDTHS = (6,)


@pytest.fixture
def sent() -> SentModel:
    weights = {"fc": np.random.default_rng(0).laplace(0, 0.1, (40, 128)).astype(np.float32)}
    side = {name: np.zeros(shape, np.float32) for name, shape in GRAPH.side_shapes().items()}
    return SentModel(GRAPH, RoundQuantizer(GRAPH, weights, side, fedmpq("best", TrainingPlan())))


def test_both_are_there_and_the_same_model(sent: SentModel, tmp_path: Path) -> None:
    outgoing = Outgoing(tmp_path)
    name, size = sent.offer(WIDTHS, outgoing)
    found = sent.plain(name)
    assert found is not None
    plain, plain_size = found
    assert outgoing.size(name) == size < plain_size == outgoing.size(plain)
    models = [decode_model(GRAPH, outgoing.read(each, 0, plain_size))[0]["fc"] for each in (name, plain)]
    assert models[0].planes.tobytes() == models[1].planes.tobytes()
    assert sent.plain(plain) is None


def test_a_round_that_was_opened_with_planes_alone_goes_on(sent: SentModel, tmp_path: Path) -> None:
    before, now = Outgoing(tmp_path / "before"), Outgoing(tmp_path / "now")
    plain = before.put(sent.payload(WIDTHS, coded=False))
    assert sent.offer_again(plain, WIDTHS, now)
    assert now.size(plain) == before.size(plain)
    # Its seats name the planes, so that is what boards are told to download.
    assert sent.plain(plain) is None
    assert sent.offer_again(sent.offer(WIDTHS, now)[0], WIDTHS, now)
    assert not sent.offer_again(bytes(32), WIDTHS, now)
