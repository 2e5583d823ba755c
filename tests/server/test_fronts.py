"""Boards at two front-ends of one leader: what they are told and what becomes of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmpq.exchange.wire import digest
from fedmpq.proto import federation_pb2 as pb
from tests import postgres
from tests.server.front_loopback import Elsewhere, Led, two_fronts
from tests.server.loopback import expected_model, run_all, same_model, small_config
from tests.server.stand_in import StandIn, held_back


@pytest.fixture
def url(postgres_server: postgres.Server) -> Iterator[str]:
    with postgres_server.database() as database:
        yield database


async def enrolled(led: Led, clients: list[StandIn]) -> list[StandIn]:
    token = led.token()
    for client in clients:
        await client.enrol(token)
    return clients


@pytest.mark.slow
def test_a_run_is_the_same_wherever_boards_call(tmp_path: Path, url: str) -> None:
    """One board at each front-end, and one that has its stream at one and makes its calls at the other."""
    config = small_config(clients_per_round=3)
    facts = [(4.0, 10), (2.0, 11), (8.0, 12)]

    async def scenario() -> None:
        async with two_fronts(tmp_path, url) as (led, (one, other)):
            led.queue(config)
            here, there = StandIn(one.address, "a", *facts[0]), StandIn(other.address, "b", *facts[1])
            between = Elsewhere(one.address, "c", *facts[2], elsewhere=other.address)
            clients = await enrolled(led, [here, there, between])
            assert await run_all(clients) == ["finished"] * 3
            assert same_model(led.model(), expected_model(config, facts))
            assert all(client.receipts.keys() == {1, 2, 3} for client in clients)

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_upload_goes_on_at_another_front_end(tmp_path: Path, url: str) -> None:
    """Half of it arrives at the first, whose call breaks off; the rest goes to the second."""

    async def scenario() -> None:
        async with two_fronts(tmp_path, url) as (led, (one, other)):
            led.queue(small_config(clients_per_round=1, rounds=1, statistics="averaged"))
            (client,) = await enrolled(led, [StandIn(one.address, "a")])
            second = StandIn(other.address, "a", identity=client.identity)

            async def upload(
                run_id: str, number: int, data: bytes, offset: int = 0, phase: pb.Phase = pb.TRAINING
            ) -> pb.Receipt:
                asked = pb.GetUploadRequest(run_id=run_id, round=number, payload=digest(data), phase=phase)
                sent = await break_off(client, asked, data)
                status = await second.stub.GetUpload(asked, metadata=second.metadata)
                while status.offset != sent:
                    status = await second.stub.GetUpload(asked, metadata=second.metadata)
                return await StandIn.upload(second, run_id, number, data, offset=sent, phase=phase)

            client.upload = upload  # type: ignore[method-assign]
            assert await run_all([client]) == ["finished"]
            await second.close()
            assert client.receipts.keys() == {1}

    asyncio.run(scenario())


async def break_off(client: StandIn, asked: pb.GetUploadRequest, data: bytes) -> int:
    """Sends half of the upload and no more; the bytes that were sent."""
    half, done = len(data) // 2, asyncio.Event()
    header = pb.UploadHeader(
        run_id=asked.run_id,
        round=asked.round,
        payload=asked.payload,
        payload_bytes=len(data),
        phase=asked.phase,
    )

    async def parts() -> AsyncIterator[pb.UploadRequest]:
        yield pb.UploadRequest(header=header)
        yield pb.UploadRequest(data=data[:half])
        await done.wait()

    call: Any = client.stub.Upload(parts(), metadata=client.metadata)
    own = client.stub.GetUpload
    # What has arrived is put down when it is asked for, so this is when it has.
    while (await own(asked, metadata=client.metadata)).offset < half:
        await asyncio.sleep(0.01)
    call.cancel()
    return half


@pytest.mark.slow
def test_a_board_that_the_round_goes_on_without_is_told_at_its_front_end(tmp_path: Path, url: str) -> None:
    config = small_config(
        clients_per_round=1, over_selection=1.0, min_clients=2, rounds=1, statistics="averaged"
    )

    async def scenario() -> None:
        async with two_fronts(tmp_path, url) as (led, (one, other)):
            led.queue(config)
            clients = await enrolled(led, [StandIn(one.address, "a"), StandIn(other.address, "b")])
            go = held_back(clients[1])
            running = asyncio.ensure_future(run_all(clients))
            while led.store.list_runs()[0].state != "finished":
                await asyncio.sleep(0.02)
            go.set()
            assert await running == ["finished"] * 2
            assert (set(clients[0].receipts), clients[1].cancelled) == ({1}, [1])

    asyncio.run(scenario())
