"""What was checked is what is stored and acknowledged, whatever its sender does meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fedmpq.exchange.wire import digest
from fedmpq.proto import federation_pb2 as pb
from tests.server.loopback import (
    PATIENCE,
    Federation,
    close_all,
    expected_model,
    federation,
    same_model,
    small_config,
)
from tests.server.stand_in import StandIn
from tests.server.test_federation_service import prepared

ATTACK_SECONDS = 1.0
"""How long the server is given to do what the attack is after; it does so at once if it does."""


class Gate:
    """Holds the server's checks of updates; what they then do is their own."""

    def __init__(self, server: Federation) -> None:
        assert server.coordinator.round is not None
        self.entered, self.opened = threading.Event(), threading.Event()
        work = server.coordinator.round.work
        check = work.check

        def held(*arguments: Any) -> None:
            self.entered.set()
            assert self.opened.wait(PATIENCE)
            check(*arguments)

        work.check = held  # type: ignore[method-assign, assignment]

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE)


def header_of(assignment: pb.Assignment, update: bytes) -> pb.UploadHeader:
    return pb.UploadHeader(
        run_id=assignment.run_id, round=1, payload=digest(update), payload_bytes=len(update)
    )


async def reopening(header: pb.UploadHeader, data: bytes) -> AsyncIterator[pb.UploadRequest]:
    yield pb.UploadRequest(header=header)
    if data:
        yield pb.UploadRequest(data=data)
    await asyncio.sleep(PATIENCE)


async def attack(
    server: Federation, client: StandIn, assignment: pb.Assignment, update: bytes, data: bytes
) -> list[Any]:
    """Upload, cancel while the server checks, and open the upload again at its first byte; the open calls."""
    gate, header = Gate(server), header_of(assignment, update)
    first = asyncio.ensure_future(client.send_upload(header, update))
    await gate.reached()
    first.cancel()
    calls = [client.stub.Upload(reopening(header, data), metadata=client.metadata) for _ in range(2)]
    client_id = client.identity.split(".")[0]
    end = time.monotonic() + ATTACK_SECONDS
    while server.uploads.stored(client_id, digest(update)) > len(data) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    gate.opened.set()
    return calls


@pytest.mark.parametrize("data", [b"", b"other bytes"])
def test_a_receipt_is_of_what_was_checked(tmp_path: Path, data: bytes) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(rounds=1, statistics="averaged")
            run = server.queue(config)
            hostile, honest = await server.clients(8, 4)
            (mine, update), (_, others) = await asyncio.gather(prepared(hostile), prepared(honest))
            calls = await attack(server, hostile, mine, update, data)
            # The one that comes last takes the place of the other.
            answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
            (receipt,) = (answer for answer in answers if isinstance(answer, pb.Receipt))
            assert receipt.payload == digest(update)
            assert server.coordinator.blobs.read(receipt.payload) == update
            assert list((tmp_path / "uploads").iterdir()) == []
            await honest.upload(run.run_id, 1, others)
            await server.until(lambda: server.store.run(run.run_id).state == "finished")
            undisturbed = expected_model(config, [(8, 10), (4, 11)])
            assert same_model(server.model(), undisturbed)
            await close_all([hostile, honest])

    asyncio.run(scenario())


def test_who_is_cut_off_while_it_is_checked_gets_its_receipt_and_sends_nothing_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            assignment, update = await prepared(client)
            gate = Gate(server)
            sending = asyncio.ensure_future(client.send_upload(header_of(assignment, update), update))
            await gate.reached()
            sending.cancel()
            question = pb.GetUploadRequest(run_id=assignment.run_id, round=1, payload=digest(update))
            asked = client.stub.GetUpload(question, metadata=client.metadata)
            gate.opened.set()
            assert (await asyncio.wait_for(asked, PATIENCE)).receipt.payload == digest(update)
            await client.close()

    asyncio.run(scenario())


def test_a_call_that_gives_up_while_it_waits_holds_up_no_later_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            assignment, update = await prepared(client)
            gate, header = Gate(server), header_of(assignment, update)
            sending = asyncio.ensure_future(client.send_upload(header, update))
            await gate.reached()
            sending.cancel()
            waiting = asyncio.ensure_future(client.send_upload(header, update))
            await asyncio.wait({waiting}, timeout=ATTACK_SECONDS)
            waiting.cancel()
            gate.opened.set()
            assert (await asyncio.wait_for(client.send_upload(header, update), PATIENCE)).receipt_id
            await client.close()

    asyncio.run(scenario())
