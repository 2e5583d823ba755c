"""Clients that answer the description of a run: none is chosen before it is ready, and none that declines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server import places
from fedmpq.server.claim_limits import ClaimLimits
from tests.server.loopback import PATIENCE, Federation, close_all, federation, run_all, small_config
from tests.server.stand_in import StandIn


class Answering:
    """A client's stream that says it answers; it takes no part in rounds."""

    def __init__(self, client: StandIn) -> None:
        self.client = client
        self._stream: Any = client.stub.Listen(self.hello(), metadata=client.metadata)
        self.heard: list[pb.Event] = []
        self._task = asyncio.create_task(self._listen())

    def hello(self) -> pb.ListenRequest:
        return pb.ListenRequest(budget=4.0, samples=10, version="new", engine="none", answers=True)

    async def _listen(self) -> None:
        async for event in self._stream:
            self.heard.append(event)

    @property
    def described(self) -> list[pb.RunDescription]:
        return [event.run for event in self.heard if event.WhichOneof("event") == "run"]

    @property
    def assigned(self) -> bool:
        return any(event.WhichOneof("event") == "assignment" for event in self.heard)

    async def say_ready(self, run_id: str, samples: int) -> None:
        await self.client.stub.Ready(
            pb.ReadyRequest(run_id=run_id, samples=samples), metadata=self.client.metadata
        )

    async def decline(self, reason: str) -> None:
        await self.client.stub.Decline(pb.DeclineRequest(reason=reason), metadata=self.client.metadata)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._stream.cancel()


async def two_clients(server: Federation) -> tuple[Answering, StandIn]:
    one, other = await server.clients(4, 4)
    return Answering(one), other


@pytest.mark.slow
def test_a_client_is_chosen_when_it_is_ready_with_the_samples_it_has_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, clients_per_round=1, profile="paper"))
            (client,) = await server.clients(4)
            board = Answering(client)
            await server.until(lambda: board.described)
            assert board.described[0].plan.epochs >= 1
            await server.until(lambda: server.coordinator.waiting_for == "0 of 1 clients ready")
            assert not board.assigned
            await board.say_ready("another run", 8)
            assert server.coordinator.waiting_for == "0 of 1 clients ready"
            await board.say_ready(run.run_id, 7)
            await server.until(lambda: board.assigned)
            assert [member.record.samples for member in server.store.members(run.run_id)] == [7]
            await board.end()
            await close_all([client])

    asyncio.run(scenario())


@pytest.mark.slow
def test_who_is_ready_while_the_server_looks_is_chosen_with_what_it_says_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, said = asyncio.Event(), asyncio.Event()
    unrevoked = places.unrevoked

    async def while_it_is_ready(*given: Any) -> dict[str, ClaimLimits]:
        allowed = await unrevoked(*given)
        looked.set()
        await said.wait()
        return allowed

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, clients_per_round=1, profile="paper"))
            (client,) = await server.clients(4)
            board = Answering(client)
            await server.until(lambda: board.described)
            await server.until(lambda: server.coordinator.waiting_for == "0 of 1 clients ready")
            monkeypatch.setattr(places, "unrevoked", while_it_is_ready)
            await board.say_ready("another run", 8)
            await asyncio.wait_for(looked.wait(), PATIENCE)
            await board.say_ready(run.run_id, 7)
            said.set()
            await server.until(lambda: board.assigned)
            assert [member.record.samples for member in server.store.members(run.run_id)] == [7]
            await board.end()
            await close_all([client])

    asyncio.run(scenario())


def test_a_client_that_declines_is_not_chosen_until_it_is_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, clients_per_round=1, profile="paper"))
            board, other = await two_clients(server)
            await server.until(lambda: board.described)
            await board.decline("class 'zebra' is none of the model's")
            connection = server.connections.get(board.client.identity.partition(".")[0])
            assert connection is not None
            await server.until(lambda: connection.declined == "class 'zebra' is none of the model's")
            assert await asyncio.wait_for(run_all([other]), PATIENCE) == ["finished"]
            names = {member.client_id for member in server.store.members(run.run_id)}
            assert names == {other.identity.partition(".")[0]}
            await board.say_ready(run.run_id, 5)
            assert connection.declined == ""
            await board.end()
            await close_all([board.client, other])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_run_that_follows_is_described_on_the_same_stream(tmp_path: Path) -> None:
    """What a client declined before counts for that run alone."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            settings = {"rounds": 1, "clients_per_round": 1, "profile": "paper"}
            server.queue(small_config(**settings))
            board, other = await two_clients(server)
            await server.until(lambda: board.described)
            await board.decline("too small")
            assert await asyncio.wait_for(run_all([other]), PATIENCE) == ["finished"]
            second = server.queue(replace(small_config(**settings), name="second"))
            await server.until(lambda: len(board.described) == 2)
            assert board.described[1].run_id == second.run_id
            await board.say_ready(second.run_id, 5)
            await server.until(lambda: board.assigned)
            await board.end()
            await close_all([board.client, other])

    asyncio.run(scenario())


def test_samples_of_no_sense_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            board = Answering(client)
            for samples in (0, 1, 1 << 41):
                with pytest.raises(grpc.aio.AioRpcError, match="2 samples or more"):
                    await board.say_ready("run", samples)
            await board.end()
            await close_all([client])

    asyncio.run(scenario())
