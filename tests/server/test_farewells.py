"""How a run ended: a client that confirms hears of it until it has said so, any other once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server import farewells as farewells_module
from fedmpq.server.connections import Connection, Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.farewells import Farewells
from fedmpq.server.store.records import Client, Run
from tests.server.loopback import Federation, close_all, federation, run_all, small_config
from tests.server.stand_in import StandIn


class Listener:
    """A stream that takes no part in rounds."""

    def __init__(self, client: StandIn, confirms: bool) -> None:
        hello = pb.ListenRequest(budget=4.0, samples=10, version="new", engine="none", confirms=confirms)
        self.client = client
        self._stream: Any = client.stub.Listen(hello, metadata=client.metadata)
        self.heard: list[pb.Event] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self._stream:
            self.heard.append(event)

    @property
    def told(self) -> list[str]:
        """The runs that ended, as far as this stream said."""
        return [event.run_ended.run_id for event in self.heard if event.WhichOneof("event") == "run_ended"]

    async def confirm(self, run_id: str) -> None:
        request = pb.ConfirmRequest(run_id=run_id)
        await self.client.stub.Confirm(request, metadata=self.client.metadata)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._stream.cancel()


async def ended_run(server: Federation) -> tuple[StandIn, str]:
    """A client of a run of one round that is over, gone before it could hear of it."""
    run = server.queue(small_config(rounds=1, clients_per_round=1, profile="paper"))
    (client,) = await server.clients(4)
    assert await run_all([client]) == ["finished"]
    await client.close()
    # As a server that was killed before it told anybody: everyone is owed the word again.
    server.coordinator._farewells.owe([client.identity.partition(".")[0]], ended(run.run_id))
    return client, run.run_id


def ended(run_id: str) -> pb.Event:
    return pb.Event(run_ended=pb.RunEnded(run_id=run_id, state="finished"))


async def waited(server: Federation, seconds: float) -> float:
    """How long a server that ends waits for its clients, if it would so many seconds at most."""
    begun = time.monotonic()
    await server.coordinator.farewell(seconds)
    return time.monotonic() - begun


@pytest.mark.slow
def test_a_client_that_confirms_hears_of_it_on_every_stream_until_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client, run_id = await ended_run(server)
            for _ in range(2):
                # The event was sent, and may have been lost with the connection.
                stream = Listener(client, confirms=True)
                await server.until(lambda: stream.told)  # noqa: B023
                assert stream.told == [run_id]
                await stream.end()
            assert await waited(server, 0.2) >= 0.2
            stream = Listener(client, confirms=True)
            await server.until(lambda: stream.told)
            await stream.confirm("another run")
            assert await waited(server, 0.2) >= 0.2
            waiting = asyncio.create_task(waited(server, 60.0))
            await stream.confirm(run_id)
            assert await waiting < 30.0
            await stream.end()
            after = Listener(client, confirms=True)
            await server.until(lambda: after.heard)
            await asyncio.sleep(0.1)
            assert after.told == []
            await after.end()
            await close_all([client])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_client_of_an_earlier_version_hears_of_it_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client, run_id = await ended_run(server)
            stream = Listener(client, confirms=False)
            await server.until(lambda: stream.told)
            assert stream.told == [run_id]
            assert await waited(server, 60.0) < 30.0
            await stream.end()
            after = Listener(client, confirms=False)
            await server.until(lambda: after.heard)
            await asyncio.sleep(0.1)
            assert after.told == []
            await after.end()
            await close_all([client])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_client_that_came_before_the_server_knew_hears_of_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that is started again the port is open before it has read what ended."""
    read, may_read = Coordinator._owe_farewells, asyncio.Event()

    async def later(self: Coordinator) -> Run | None:
        await may_read.wait()
        return await read(self)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client, run_id = await ended_run(server)
            await server.crash()
            monkeypatch.setattr(Coordinator, "_owe_farewells", later)
            await server.start()
            stream = Listener(client, confirms=True)
            await server.until(lambda: stream.heard)
            assert stream.told == []
            may_read.set()
            await server.until(lambda: stream.told)
            assert stream.told == [run_id]
            await stream.end()
            await close_all([client])

    asyncio.run(scenario())


def confirming(connections: Connections) -> Connection:
    """Of a client that has just connected."""
    connection = connections.connect(
        Client("a-client", "board", b"", None, 4.0, 10, "new", "none", 0.0, None, None)
    )
    connection.confirms = True
    return connection


def test_a_client_that_comes_and_goes_for_ever_keeps_no_server_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(farewells_module, "LONGEST_SECONDS", 0.5)

    async def scenario() -> None:
        connections = Connections(max_clients=2)
        farewells, connection = Farewells(connections), confirming(connections)
        farewells.owe(["a-client"], ended("a-run"))
        waiting = asyncio.create_task(farewells.all_told(60.0))
        while not waiting.done():
            farewells.tell(connection)
            await asyncio.wait({waiting}, timeout=0.05)

    asyncio.run(asyncio.wait_for(scenario(), 30.0))


def test_a_client_that_comes_back_is_waited_for_once_more() -> None:
    async def scenario() -> None:
        connections = Connections(max_clients=2)
        farewells, connection = Farewells(connections), confirming(connections)
        farewells.owe(["a-client"], ended("a-run"))
        waiting = asyncio.create_task(farewells.all_told(2.0))
        await asyncio.sleep(0.05)
        told = time.monotonic()
        farewells.tell(connection)
        assert await connection.next() == ended("a-run")
        await waiting
        assert time.monotonic() - told >= 2.0

    asyncio.run(scenario())
