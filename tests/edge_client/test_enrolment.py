"""A board asks for its identity, and asks again when the server says it may."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import grpc
import pytest

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint
from fedmpq.edge_client.connection import enrol
from fedmpq.edge_client.identity import Identity
from fedmpq.proto import federation_pb2 as pb
from tests.edge_client.fake_federation import TOKEN, FakeFederation, RunningServer, refuse

PATIENCE = 60.0


def enrolled(server: RunningServer, folder: Path) -> Identity:
    request = pb.EnrollRequest(token=TOKEN, name="board", budget=4)
    asking = enrol(
        Endpoint(server.address), request, folder / "identity.json", Backoff(0.001, 0.001), PATIENCE
    )
    return asyncio.run(asyncio.wait_for(asking, PATIENCE))


@pytest.mark.parametrize(
    ("hint", "least", "words"),
    [("1", 1.0, "enrols nobody now"), (None, 0.0, "cannot be reached"), ("soon", 0.0, "cannot be reached")],
)
def test_the_next_try_waits_as_long_as_the_server_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hint: str | None, least: float, words: str
) -> None:
    fake = FakeFederation()
    fake.faults.enrol = [refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", hint)]
    server = RunningServer(fake)
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "fedmpq.client"):
        assert enrolled(server, tmp_path).name == "board"
    server.stop()
    assert time.monotonic() - began >= least
    assert fake.count("Enroll") == 2
    assert words in caplog.text
