"""Boards that vanish, are revoked, rejected or silent: their places go to others, and rounds go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from fedmpq.exchange.messages import Update
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server import collecting
from fedmpq.server.learned_deadline import (
    FACTOR,
    FIRST_SECONDS,
    LEAST_SECONDS,
    MOST_SECONDS,
    SLOWEST,
    learned_seconds,
)
from tests.server.loopback import PATIENCE, Federation, close_all, federation, run_all, small_config
from tests.server.stand_in import StandIn, held_back, nudge


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LOOK_SECONDS", 0.2)


async def never(assignment: pb.Assignment) -> None:
    """A client that takes its work and is not heard of again."""


def states(server: Federation, run_id: str, number: int = 1) -> dict[int, str]:
    return {seat.client: seat.state for seat in server.store.round(run_id, number).seats}


class Vanishing:
    """A board that takes its first work and is away when `leave` returns."""

    def __init__(self, client: StandIn) -> None:
        self.client = client
        client.work = never  # type: ignore[method-assign]
        self.task = asyncio.create_task(client.run())

    async def leave(self, server: Federation) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.close()
        client_id = self.client.identity.partition(".")[0]
        await server.until(lambda: server.connections.get(client_id) is None)


async def opened(server: Federation) -> None:
    await server.until(lambda: server.coordinator.round is not None)


def test_a_run_goes_on_without_a_board_that_never_comes_back(tmp_path: Path) -> None:
    """With the settings that `fedmpq split` writes: a quorum of all, no spare board, no deadline given."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=3))
            stays, goes = await server.clients(4, 4)
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            await server.until(lambda: 1 in stays.receipts)
            server.pass_time(FIRST_SECONDS / 2)
            await server.until(lambda: "are away, for" in server.coordinator.waiting_for)
            assert server.store.run(run.run_id).round == 0, "below its quorum a round waits for its deadline"
            server.pass_time(FIRST_SECONDS / 2)
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            assert states(server, run.run_id) == {0: "updated", 1: "cut"}
            assert [states(server, run.run_id, number) for number in (2, 3)] == [{0: "updated"}] * 2
            assert server.store.run(run.run_id).round == 3
            await close_all([stays])

    asyncio.run(scenario())


def test_a_board_that_is_away_too_long_gives_its_place_to_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, away_seconds=100, profile="paper"))
            first, goes, spare = await server.clients(4, 4, 8)
            running, lost = asyncio.create_task(first.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            waiting = asyncio.create_task(spare.run())
            await spare.connected.wait()
            await server.until(lambda: 1 in first.receipts)
            assert states(server, run.run_id) == {0: "updated", 1: "selected"}
            server.pass_time(100)
            assert await asyncio.wait_for(asyncio.gather(*[running, waiting]), PATIENCE) == ["finished"] * 2
            assert states(server, run.run_id) == {0: "updated", 1: "cut", 2: "updated"}
            assert "away for more than 100 s" in server.store.round(run.run_id, 1).seats[1].reason
            await close_all([first, spare])

    asyncio.run(scenario())


def test_with_a_quorum_there_a_board_that_is_away_too_long_is_waited_for_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, quorum=0.5, profile="paper"))
            stays, goes = await server.clients(4, 4)
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            await server.until(lambda: 1 in stays.receipts)
            assert server.store.run(run.run_id).round == 0
            server.pass_time(300)
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            assert states(server, run.run_id) == {0: "updated", 1: "cut"}
            await close_all([stays])

    asyncio.run(scenario())


def test_a_deadline_of_nothing_waits_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, deadline_seconds=0, profile="paper"))
            stays, goes = await server.clients(4, 4)
            work = goes.work
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            await server.until(lambda: 1 in stays.receipts)
            server.pass_time(1e7)
            await server.until(lambda: server.coordinator.waiting_for.endswith("are away"))
            assert states(server, run.run_id) == {0: "updated", 1: "selected"}
            goes.work = work  # type: ignore[method-assign]
            assert await run_all([goes]) == ["finished"]
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            assert states(server, run.run_id) == {0: "updated", 1: "updated"}
            await close_all([stays])

    asyncio.run(scenario())


@pytest.mark.parametrize("deadline", [None, 0])
def test_a_rejected_update_does_not_stop_a_run_without_spare_boards(
    tmp_path: Path, deadline: float | None
) -> None:
    def too_loud(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
        return replace(nudge(graph, assignment, payload, samples), samples=samples * 1000)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=5, deadline_seconds=deadline))
            good, bad = await server.clients(4, 4)
            bad.train = too_loud
            work, refused = bad.work, list[str]()

            async def go_on(assignment: pb.Assignment) -> None:
                try:
                    await work(assignment)
                except grpc.aio.AioRpcError as error:
                    refused.append(error.details() or "")

            bad.work = go_on  # type: ignore[method-assign]
            assert await run_all([good, bad]) == ["finished"] * 2
            assert len(refused) == 3, "three strikes, and the run goes on without it"
            assert [states(server, run.run_id, number) for number in range(1, 6)] == [
                *[{0: "updated", 1: "rejected"}] * 3,
                *[{0: "updated"}] * 2,
            ]
            assert server.coordinator.tally.extended == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("deadline", [None, 0])
def test_a_revoked_board_holds_no_place(tmp_path: Path, deadline: float | None) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=2, deadline_seconds=deadline, away_seconds=1))
            stays, goes = await server.clients(4, 4)
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            server.store.revoke_client(goes.name, 0.0)
            assert await asyncio.wait_for(running, PATIENCE) == "finished"
            assert states(server, run.run_id) == {0: "updated", 1: "cut"}
            assert server.store.round(run.run_id, 1).seats[1].reason == "the client was revoked"
            assert states(server, run.run_id, 2) == {0: "updated"}
            await close_all([stays])

    asyncio.run(scenario())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_board_that_enrols_again_gets_its_place_again(tmp_path: Path, restarted: bool) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=2, deadline_seconds=0, profile="paper"))
            stays, goes = await server.clients(4, 4)
            go = held_back(stays)
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            server.store.revoke_client(goes.name, 0.0)
            if restarted:
                await server.crash()
                await server.start()
            again = StandIn(server.address, goes.name, 4.0, samples=goes.samples)
            await again.enrol(server.token())
            coming = asyncio.create_task(again.run())
            await server.until(lambda: 1 in again.receipts)
            go.set()
            assert await asyncio.wait_for(asyncio.gather(*[running, coming]), PATIENCE) == ["finished"] * 2
            assert states(server, run.run_id) == {0: "updated", 1: "cut", 2: "updated"}
            assert states(server, run.run_id, 2) == {0: "updated", 2: "updated"}
            await close_all([stays, again])

    asyncio.run(scenario())


def declining(client: StandIn, reason: str) -> None:
    """The client refuses the work it gets."""

    async def refuse(assignment: pb.Assignment) -> None:
        request = pb.DeclineRequest(
            run_id=assignment.run_id, round=assignment.round, phase=assignment.phase, reason=reason
        )
        await client.stub.Decline(request, metadata=client.metadata)

    client.work = refuse  # type: ignore[method-assign]


def test_a_board_that_cannot_take_part_is_not_chosen_until_it_connects_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=100_000, away_seconds=1, profile="paper"))
            able, unable = await server.clients(4, 4)
            work = unable.work
            declining(unable, "no space\x1b[2J left")
            running = [asyncio.create_task(client.run()) for client in (able, unable)]
            await server.until(lambda: server.store.run(run.run_id).round >= 2)
            stored = server.store.round(run.run_id, 1)
            assert [(seat.state, seat.reason) for seat in stored.seats] == [
                ("updated", ""),
                ("declined", "no space[2J left"),
            ]
            assert stored.metrics["declined"] == 1
            assert server.store.members(run.run_id)[1].strikes == 0
            assert states(server, run.run_id, 2) == {0: "updated"}
            unable.work = work  # type: ignore[method-assign]
            running.pop().cancel()
            await unable.close()
            running.append(asyncio.create_task(unable.run()))
            await server.until(lambda: bool(unable.receipts))
            await server.coordinator.controls.abort(run.run_id)
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["aborted"] * 2
            await close_all([able, unable])

    asyncio.run(scenario())


def test_a_place_that_is_given_up_may_be_had_again(tmp_path: Path) -> None:
    """Also by a client that does not say which round it means, because it cannot even begin."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, clients_per_round=1, profile="paper"))
            (unable,) = await server.clients(4)
            work = unable.work
            unable.work = never  # type: ignore[method-assign]
            running = asyncio.create_task(unable.run())
            await opened(server)
            await unable.stub.Decline(pb.DeclineRequest(reason="too few images"), metadata=unable.metadata)
            await server.until(lambda: states(server, run.run_id) == {0: "declined"})
            await server.until(lambda: "no board can take a free place" in server.coordinator.waiting_for)
            unable.work = work  # type: ignore[method-assign]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await unable.close()
            assert await run_all([unable]) == ["finished"], "its new stream gets the place again"
            assert states(server, run.run_id) == {0: "updated"}

    asyncio.run(scenario())


def test_a_board_that_gives_up_its_place_again_and_again_gets_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=1, profile="paper"))
            able, unable = await server.clients(4, 4)
            work, held = unable.work, held_back(able)
            running = asyncio.create_task(able.run())
            unable.work = never  # type: ignore[method-assign]
            for _ in range(collecting.MAX_DECLINES):
                listening = asyncio.create_task(unable.run())
                await opened(server)
                await server.until(lambda: states(server, run.run_id)[1] == "selected")
                await unable.stub.Decline(pb.DeclineRequest(reason="no"), metadata=unable.metadata)
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
                await unable.close()
            unable.work = work  # type: ignore[method-assign]
            again = asyncio.create_task(unable.run())
            held.set()
            ended = await asyncio.wait_for(asyncio.gather(running, again), PATIENCE)
            assert set(ended) == {"finished"}
            assert states(server, run.run_id) == {0: "updated", 1: "declined"}
            await close_all([able, unable])

    asyncio.run(scenario())


@pytest.mark.parametrize("answering", [True, False])
def test_a_board_that_is_there_and_silent_is_waited_for_three_times(tmp_path: Path, answering: bool) -> None:
    """Then the round closes with what it has, or others get the places if it has nothing."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(rounds=1, deadline_seconds=10, profile="paper")
            run = server.queue(config if answering else replace(config, clients_per_round=1, min_clients=1))
            silent, other = await server.clients(4, 4)
            silent.work = never  # type: ignore[method-assign]
            running = [asyncio.create_task(silent.run())]
            if not answering:
                await opened(server)
            running.append(asyncio.create_task(other.run()))
            await opened(server)
            await server.until(lambda: len(server.connections) == 2)
            if answering:
                await server.until(lambda: 1 in other.receipts)
            for number in (1, 2, 3):
                server.pass_time(10)
                if number < 3:
                    await server.until(extended(server, number))
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            assert states(server, run.run_id) == {0: "cut", 1: "updated"}
            await close_all([silent, other])

    asyncio.run(scenario())


def extended(server: Federation, times: int) -> Callable[[], bool]:
    return lambda: server.coordinator.tally.extended == times


def test_a_number_of_clients_that_is_said_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=2, min_clients=2, quorum=0.5, profile="paper"))
            stays, goes = await server.clients(4, 4)
            running, lost = asyncio.create_task(stays.run()), Vanishing(goes)
            await opened(server)
            await lost.leave(server)
            await server.until(lambda: 1 in stays.receipts)
            server.pass_time(300)
            await server.until(lambda: server.store.run(run.run_id).round == 1)
            server.pass_time(1e6)
            await server.until(lambda: server.coordinator.waiting_for == "1 of 2 clients ready")
            await server.coordinator.controls.abort(run.run_id)
            assert await asyncio.wait_for(running, PATIENCE) == "aborted"
            await close_all([stays])

    asyncio.run(scenario())


def test_the_deadline_that_is_learned() -> None:
    assert learned_seconds([]) == FIRST_SECONDS
    assert learned_seconds([1.0, 2.0]) == LEAST_SECONDS
    assert learned_seconds([200.0, 1000.0, 30.0]) == FACTOR * 1000
    assert learned_seconds([1e9]) == MOST_SECONDS


def test_what_is_learned_is_stored_and_the_same_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(rounds=3, profile="paper"))
            quick, slow = await server.clients(4, 4)
            work = slow.work

            async def take_long(assignment: pb.Assignment) -> None:
                if assignment.round == 3:
                    await asyncio.Event().wait()
                server.pass_time(1000.0 * assignment.round)
                await work(assignment)

            slow.work = take_long  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in (quick, slow)]
            await server.until(lambda: third_round_seconds(server) > 0)
            slowest = [server.store.round(run.run_id, number).metrics[SLOWEST] for number in (1, 2)]
            assert slowest == pytest.approx([1000, 2000], abs=PATIENCE)
            learned = third_round_seconds(server)
            assert learned == FACTOR * slowest[1]
            stored = server.store.current_round(run.run_id)
            assert stored is not None
            assert stored.deadline is not None
            assert stored.deadline - stored.opened == pytest.approx(learned, abs=PATIENCE)
            await server.crash()
            await server.start()
            await server.until(lambda: third_round_seconds(server) > 0)
            assert third_round_seconds(server) == learned
            await server.coordinator.controls.abort(run.run_id)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await close_all([quick, slow])

    asyncio.run(scenario())


def third_round_seconds(server: Federation) -> float:
    """How long the third round waits; 0 while it is not open."""
    current = server.coordinator.round
    return current.work.seconds if current is not None and current.stored.address.number == 3 else 0.0
