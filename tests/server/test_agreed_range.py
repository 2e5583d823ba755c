"""One range of measured values for a run: from the boards' bounds, stored before anyone hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fedmpq.data.value_range import ValueRange
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.run_range import stored_range
from tests.server.loopback import Federation, close_all, federation, small_config
from tests.server.stand_in import StandIn
from tests.server.test_readiness import Answering


class Measuring(Answering):
    """A client that says which values it has measured."""

    def __init__(self, client: StandIn, low: list[float], high: list[float]) -> None:
        self.low, self.high = low, high
        super().__init__(client)

    def hello(self) -> pb.ListenRequest:
        return pb.ListenRequest(
            budget=4.0, samples=10, version="new", answers=True, low=self.low, high=self.high
        )


def described(board: Answering) -> list[tuple[list[float], list[float]]]:
    return [(list(run.low), list(run.high)) for run in board.described]


def config(**changes: Any) -> Any:
    return small_config(rounds=1, clients_per_round=3, profile="paper", data_range="boards", **changes)


@pytest.mark.slow
def test_boards_agree_on_medians_and_a_restart_keeps_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(config())
            clients = await server.clients(4, 4, 4, 4)
            boards = [Measuring(clients[0], [-1.0], [3.0]), Measuring(clients[1], [-1e20], [1e20])]
            await server.until(lambda: "2 have said theirs" in server.coordinator.waiting_for)
            assert not any(board.described for board in boards), "nobody hears of the run before"
            boards.append(Measuring(clients[2], [0.0], [5.0]))
            await server.until(lambda: all(board.described for board in boards))
            assert all(described(board) == [([-1.0], [5.0])] for board in boards)
            await asyncio.gather(*(board.end() for board in boards))
            await restarted(server)
            late = Measuring(clients[3], [-100.0], [100.0])
            await server.until(lambda: bool(late.described))
            assert described(late) == [([-1.0], [5.0])]
            found = stored_range(server.store, run.run_id, config())
            assert found == ValueRange((-1.0,), (5.0,))
            await late.end()
            await close_all(clients)

    asyncio.run(scenario())


async def restarted(server: Federation) -> None:
    await server.crash()
    await server.start()


def test_a_range_that_is_given_holds_without_boards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(rounds=1, clients_per_round=1, profile="paper", data_range="-2..2"))
            (client,) = await server.clients(4)
            board = Measuring(client, [-100.0], [100.0])
            await server.until(lambda: bool(board.described))
            assert described(board) == [([-2.0], [2.0])]
            await board.end()
            await close_all([client])

    asyncio.run(scenario())


def test_a_client_that_knows_of_no_range_is_not_chosen(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(rounds=1, clients_per_round=1, profile="paper", data_range="-2..2"))
            (old,) = await server.clients(4)
            running = asyncio.create_task(old.run())
            await server.until(lambda: len(server.connections) == 1)
            await server.until(lambda: server.coordinator.waiting_for == "0 of 1 clients ready")
            running.cancel()
            await asyncio.wait({running})
            await close_all([old])

    asyncio.run(scenario())


def test_bounds_of_no_sense_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            for low, high in (
                ([1.0], [0.0]),
                ([0.0], []),
                ([float("nan")], [1.0]),
                ([0.0] * 5000, [1.0] * 5000),
            ):
                request = pb.ListenRequest(budget=4.0, samples=10, answers=True, low=low, high=high)
                with pytest.raises(grpc.aio.AioRpcError, match="the bounds of this client's values"):
                    async for _ in client.stub.Listen(request, metadata=client.metadata):
                        pass
            await close_all([client])

    asyncio.run(scenario())
