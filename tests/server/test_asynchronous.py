"""Merges without rounds, on a real server: who is in which, what survives a crash, and who is not waited for.

That every model follows from the stored order of arrivals, to the bit, is checked after each test: by the
histories of its boards (`loopback.federation`).
"""

from __future__ import annotations

import asyncio
import io
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from fedmpq.exchange.messages import Update
from fedmpq.exchange.wire import digest
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.collecting import LOOK_SECONDS
from fedmpq.server.run_config import ConfigError, RunConfig
from fedmpq.server.run_history import run_history
from fedmpq.server.run_queue import RunQueue
from fedmpq.server.status_report import console, status_table
from fedmpq.server.store.records import RoundAddress, Seat
from fedmpq.server.stored_status import stored_status
from tests.server.loopback import (
    PATIENCE,
    Federation,
    close_all,
    expected_model,
    federation,
    run_all,
    same_model,
    small_config,
)
from tests.server.own_methods import BAD, PickyBuffer
from tests.server.stand_in import StandIn, held_back, nudge

PICKY = "tests.server.own_methods:PickyBuffer"


def buffered(count: int, at_work: int, **settings: Any) -> RunConfig:
    """Merges of so many changes."""
    return small_config(**{"asynchronous": count, "clients_per_round": at_work, "rounds": 6, **settings})


def merges(server: Federation) -> list[list[tuple[int, str, int]]]:
    """Client, outcome and staleness of all who were in each merge."""
    run = server.store.run_by_name("small")
    assert run is not None
    rounds = run_history(server.store, run).rounds
    return [[(one.client, one.outcome, one.staleness) for one in each.clients] for each in rounds]


def merged(server: Federation, number: int) -> bool:
    run = server.store.run_by_name("small")
    return run is not None and run.round >= number


@contextmanager
def held_merge(server: Federation) -> Iterator[None]:
    """The thread that merges is busy with something else."""
    over = threading.Event()
    server.coordinator._resources.workers._merger.submit(over.wait)
    try:
        yield
    finally:
        over.set()


def held_check(server: Federation, client: int) -> tuple[asyncio.Event, asyncio.Event]:
    """What that client answers is checked once the second event is set; the first says that it is there."""
    workers = server.coordinator._resources.workers
    arrived, go, check = asyncio.Event(), asyncio.Event(), workers.check

    async def wait_first(work: Callable[..., Any], *arguments: Any) -> Any:
        if any(isinstance(one, Seat) and one.client == client for one in arguments):
            arrived.set()
            await go.wait()
        return await check(work, *arguments)

    workers.check = wait_first  # type: ignore[method-assign]
    return arrived, go


def refusals_of(client: StandIn) -> list[tuple[grpc.StatusCode, str]]:
    """What its uploads end with that have no receipt, as they come."""
    found, upload = list[tuple[grpc.StatusCode, str]](), client.send_upload

    async def noted(header: pb.UploadHeader, data: bytes) -> pb.Receipt:
        try:
            return await upload(header, data)
        except grpc.aio.AioRpcError as error:
            found.append((error.code(), error.details() or ""))
            raise

    client.send_upload = noted  # type: ignore[method-assign]
    return found


def held_after(clients: Sequence[StandIn], numbers: Sequence[int]) -> asyncio.Event:
    """The boards train in so many rounds, and in later ones once the event is set."""
    go = asyncio.Event()

    def hold(client: StandIn, number: int) -> None:
        work = client.work

        async def wait_first(assignment: pb.Assignment) -> None:
            if assignment.round > number:
                await go.wait()
            await work(assignment)

        client.work = wait_first  # type: ignore[method-assign]

    for client, number in zip(clients, numbers, strict=True):
        hold(client, number)
    return go


class Running:
    """Boards at work beside the test."""

    def __init__(self, clients: Sequence[StandIn]) -> None:
        self._clients = clients
        self._tasks = [asyncio.create_task(client.run()) for client in clients]

    async def end(self) -> list[str]:
        try:
            return await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE)
        finally:
            await close_all(self._clients)

    async def stop(self, *numbers: int) -> None:
        """These boards are gone."""
        for number in numbers:
            self._tasks[number].cancel()
        await asyncio.gather(*(self._tasks[number] for number in numbers), return_exceptions=True)
        await close_all([self._clients[number] for number in numbers])


def test_all_boards_in_every_merge_are_rounds_with_a_mean(tmp_path: Path) -> None:
    """To the bit what rounds come to, and what a simulation does: calibrated at the end alone."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = buffered(3, 3, rounds=4)
            server.queue(config)
            clients = await server.clients(2, 4, 8)
            assert await run_all(clients) == ["finished"] * 3
            rounds = small_config(rounds=4, clients_per_round=3, aggregation="mean", evaluate_every=4)
            expected = expected_model(rounds, [(2, 10), (4, 11), (8, 12)])
            assert same_model(server.model(), expected)
            assert [list(client.measured) for client in clients] == [[4]] * 3
            assert merges(server) == [[(client, "trained", 0) for client in range(3)]] * 4

    asyncio.run(scenario())


def test_a_slow_board_is_merged_into_a_later_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(2, 4))
            clients = await server.clients(2, 4, 6, 8)
            slow, others = held_back(clients[3]), held_after(clients[:3], [3, 3, 3])
            running = Running(clients)
            await server.until(lambda: merged(server, 3))
            slow.set()
            await server.until(lambda: clients[3].receipts)
            others.set()
            assert await running.end() == ["finished"] * 4
            assert next(iter(clients[3].receipts)) == 1, "it was sent the first version"
            ages = [age for each in merges(server) for client, _, age in each if client == 3]
            assert ages[0] >= 3
            assert all(sum(one[1] == "trained" for one in each) >= 2 for each in merges(server))
            in_time = [number for client in clients for number in client.cancelled if number < 4]
            assert not in_time, "only the last merge goes on without anyone"
            last = server.store.last_metrics(server.store.list_runs()[0].run_id, 6)
            assert max(metrics["staleness"] for metrics in last) > 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_crashes_lose_nothing(tmp_path: Path) -> None:
    """At random moments, with boards of unequal speed at work on several versions."""
    moments = random.Random(1)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(2, 4, rounds=14, profile="paper", merge="deltas"))
            clients = await server.clients(2, 4, 6, 8)
            for client, seconds in zip(clients, (0.01, 0.02, 0.05, 0.15), strict=True):
                slow_down(client, seconds)
            running = Running(clients)
            for _ in range(5):
                await asyncio.sleep(moments.uniform(0.0, 0.4))
                await server.crash()
                await server.start()
            assert await running.end() == ["finished"] * 4
            assert max(age for each in merges(server) for _, _, age in each) > 0

    asyncio.run(scenario())


def slow_down(client: StandIn, seconds: float) -> None:
    work = client.work

    async def slowly(assignment: pb.Assignment) -> None:
        await asyncio.sleep(seconds)
        await work(assignment)

    client.work = slowly  # type: ignore[method-assign]


def test_work_on_an_earlier_version_outlives_the_server(tmp_path: Path) -> None:
    """The model it was sent is read again, for its payload, its check and its merge."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 3, rounds=5))
            clients = await server.clients(2, 4, 8)
            slow, first = held_after(clients[1:], [0, 0]), held_after(clients[:1], [2])
            running = Running(clients)
            await server.until(lambda: merged(server, 2))
            await server.crash()
            await server.start()
            slow.set()
            await server.until(lambda: clients[1].receipts and clients[2].receipts)
            first.set()
            assert await running.end() == ["finished"] * 3
            counted = [(client, age) for each in merges(server) for client, _, age in each]
            assert counted[:2] == [(0, 0), (0, 0)]
            assert {1, 2} <= {client for client, age in counted if age >= 2}

    asyncio.run(scenario())


def test_what_arrives_during_a_merge_is_in_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=2, profile="paper", merge="deltas"))
            clients = await server.clients(4, 8)
            events = [held_back(client) for client in clients]
            running = Running(clients)
            await server.until(lambda: server.coordinator.round is not None)
            with held_merge(server):
                events[0].set()
                await server.until(lambda: 1 in clients[0].receipts)
                await server.until(lambda: server.coordinator.waiting_for == "the merge")
                events[1].set()
                await server.until(lambda: 1 in clients[1].receipts)
            assert await running.end() == ["finished"] * 2
            first, second = merges(server)
            assert first == [(0, "trained", 0)]
            assert (1, "trained", 1) in second

    asyncio.run(scenario())


def test_what_would_be_too_old_is_not_acknowledged(tmp_path: Path) -> None:
    """During a merge, after which it could not count any more."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=2, staleness_limit=0, profile="paper", merge="deltas"))
            clients = await server.clients(4, 8)
            events = [held_back(client) for client in clients]
            running = Running(clients)
            await server.until(lambda: server.coordinator.round is not None)
            with held_merge(server):
                events[0].set()
                await server.until(lambda: server.coordinator.waiting_for == "the merge")
                events[1].set()
                await asyncio.sleep(0.2)
                assert 1 not in clients[1].receipts
            assert await running.end() == ["finished"] * 2
            assert (1, "late", 0) in merges(server)[0]

    asyncio.run(scenario())


def test_a_board_that_is_too_late_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=4, staleness_limit=1))
            clients = await server.clients(4, 8)
            go = held_back(clients[1])
            running = Running(clients)
            await server.until(lambda: merged(server, 2))
            go.set()
            assert await running.end() == ["finished"] * 2
            run_id = server.store.list_runs()[0].run_id
            seat = next(seat for seat in server.store.round(run_id, 2).seats if seat.client == 1)
            assert seat.state == "cut"
            assert "version 0 of the model, 2 merges ago; staleness_limit = 1" in seat.reason
            assert 1 in clients[1].cancelled
            assert 1 not in clients[1].receipts

    asyncio.run(scenario())


def test_a_board_that_is_revoked_while_its_answer_is_checked_is_refused(tmp_path: Path) -> None:
    """The merges go on without its place, and nobody keeps the version that it was sent."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=4))
            clients = await server.clients(4, 8)
            go, slow = held_after(clients[:1], [2]), held_back(clients[1])
            refusals = refusals_of(clients[1])
            arrived, checked = held_check(server, 1)
            running = Running(clients)
            await server.until(lambda: merged(server, 2))
            slow.set()
            await asyncio.wait_for(arrived.wait(), PATIENCE)
            server.store.revoke_client("client-1", 0.0)
            server.pass_time(LOOK_SECONDS + 1)
            await server.until(lambda: server.coordinator.round.stored.seats_in("cut"))  # type: ignore[union-attr]
            go.set()
            await server.until(lambda: merged(server, 4))
            checked.set()
            await server.until(lambda: refusals)
            await running.stop(0, 1)
            ((code, words),) = refusals
            assert code is grpc.StatusCode.FAILED_PRECONDITION, words
            assert (1, "late", 2) in merges(server)[2]
            assert not clients[1].receipts

    asyncio.run(scenario())


def test_a_silent_board_does_not_hold_a_place(tmp_path: Path) -> None:
    """After its time another is given work; its own answer still counts when it comes."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 1, min_clients=2, deadline_seconds=600))
            clients = await server.clients(4, 8)
            events = [held_back(client) for client in clients]
            running = Running(clients)
            await server.until(lambda: server.coordinator.round is not None)
            (seat,) = server.coordinator.round.stored.seats  # type: ignore[union-attr]
            silent, other = seat.client, 1 - seat.client
            events[other].set()
            await asyncio.sleep(0.2)
            assert not merged(server, 1)
            server.pass_time(601)
            await server.until(lambda: merged(server, 2))
            events[other].clear()
            events[silent].set()
            await server.until(lambda: clients[silent].receipts)
            events[other].set()
            assert await running.end() == ["finished"] * 2
            late = [one for each in merges(server) for one in each if one[0] == silent and one[2] >= 2]
            assert late == [(silent, "trained", late[0][2])]

    asyncio.run(scenario())


def test_a_merge_is_made_of_fewer_when_boards_are_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(3, 3, rounds=2, away_seconds=100))
            clients = await server.clients(2, 4, 8)
            held_back(clients[2])
            running = Running(clients)
            await server.until(lambda: {1} == set(clients[0].receipts) == set(clients[1].receipts))
            await running.stop(2)
            await server.until(lambda: len(server.connections.connected()) == 2)
            assert not merged(server, 1)
            server.pass_time(101)
            await server.until(lambda: merged(server, 2))
            await running.stop(0, 1)
            assert [sum(one[1] == "trained" for one in each) for each in merges(server)] == [2, 2]

    asyncio.run(scenario())


def test_no_work_is_given_below_min_clients(tmp_path: Path) -> None:
    """And a board that comes back goes on with what it was sent, although others were merged meanwhile."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(2, 2, rounds=4, min_clients=2, away_seconds=100))
            clients = await server.clients(4, 8)
            events = [held_after([client], [1]) for client in clients]
            running = Running(clients)
            await server.until(lambda: merged(server, 1))
            events[0].set()
            await server.until(lambda: 2 in clients[0].receipts)
            await running.stop(1)
            await server.until(lambda: len(server.connections.connected()) == 1)
            assert not merged(server, 2)
            server.pass_time(101)
            await server.until(lambda: merged(server, 2))
            await server.until(lambda: "1 of 2 clients ready" in server.coordinator.waiting_for)
            assert merges(server)[1] == [(0, "trained", 0)]
            events[1].set()
            assert await asyncio.wait_for(clients[1].run(), PATIENCE) == "finished"
            assert (1, "trained", 1) in merges(server)[2]
            await running.stop(0)
            await close_all(clients)

    asyncio.run(scenario())


def test_a_paused_run_gives_no_work_and_keeps_what_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(buffered(2, 2, rounds=3))
            clients = await server.clients(4, 8)
            events = [held_back(client) for client in clients]
            running = Running(clients)
            await server.until(lambda: server.coordinator.round is not None)
            await server.coordinator.controls.pause(run.run_id)
            events[0].set()
            await server.until(lambda: 1 in clients[0].receipts)
            events[1].set()
            await server.until(lambda: merged(server, 1))
            await asyncio.sleep(0.3)
            opened = server.store.current_round(run.run_id)
            assert opened is not None
            assert (opened.address.number, opened.seats) == (2, ())
            # What was merged, and versions that nobody is at work on, are kept no longer.
            blobs = {path.name for path in (tmp_path / "blobs").iterdir() if len(path.name) == 64}
            assert blobs == {name.hex() for name in server.store.blobs_in_use()}
            await server.coordinator.controls.resume(run.run_id)
            assert await running.end() == ["finished"] * 2

    asyncio.run(scenario())


def test_a_receipt_is_found_after_many_merges(tmp_path: Path) -> None:
    """Under the round that the board was sent, although its change was merged later and is long folded."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=12, profile="paper", merge="deltas"))
            clients = await server.clients(4, 8)
            sent: list[bytes] = []
            made = clients[1].update

            def keep(assignment: pb.Assignment, payload: bytes) -> bytes:
                sent.append(made(assignment, payload))
                return sent[-1]

            clients[1].update = keep  # type: ignore[method-assign]
            go = held_after(clients, [2, 0])
            running = Running(clients)
            await server.until(lambda: merged(server, 2))
            go.set()
            assert await running.end() == ["finished"] * 2
            run_id = server.store.list_runs()[0].run_id
            request = pb.GetUploadRequest(run_id=run_id, round=1, payload=digest(sent[0]))
            status = await clients[1].stub.GetUpload(request, metadata=clients[1].metadata)
            assert status.receipt == clients[1].receipts[1]
            seat = server.store.seat_of(RoundAddress(run_id, 1), clients[1].identity.partition(".")[0])
            assert seat is not None
            assert seat.version == 0
            request.round = 2
            with pytest.raises(grpc.aio.AioRpcError, match="not in round 2"):
                await clients[1].stub.GetUpload(request, metadata=clients[1].metadata)
            await close_all(clients)

    asyncio.run(scenario())


def test_the_server_measures_on_the_way_if_it_has_images(tmp_path: Path) -> None:
    """With a share of the boards at work, and a restart that reads versions with measured statistics."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images, y_train=np.arange(40) % 5)
    np.savez(tmp_path / "test.npz", x_test=images, y_test=np.arange(40) % 5)
    data = {"calibration_data": str(tmp_path / "images.npz"), "test_data": str(tmp_path / "test.npz")}

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            share = {"clients_per_round": None, "participation": 0.75, "min_clients": 4}
            server.queue(buffered(2, 0, evaluate_every=2, **share, **data))
            clients = await server.clients(2, 4, 6, 8)
            go = held_after(clients, [3, 3, 3, 3])
            running = Running(clients)
            await server.until(lambda: merged(server, 3))
            opened = server.store.current_round(server.store.list_runs()[0].run_id)
            assert opened is not None
            assert len(opened.seats_in("selected")) <= 3, "three quarters of four"
            await server.crash()
            await server.start()
            go.set()
            assert await running.end() == ["finished"] * 4
            rounds = run_history(server.store, server.store.list_runs()[0]).rounds
            assert [facts.measured_by for facts in rounds] == ["", "test data"] * 3
            assert not any(client.measured for client in clients)

    asyncio.run(scenario())


def test_a_bad_change_is_thrown_out_and_those_at_work_stay(tmp_path: Path) -> None:
    def bad_at_first(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
        honest = nudge(graph, assignment, payload, samples)
        return replace(honest, loss=BAD) if assignment.round == 1 else honest

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(buffered(3, 4, rounds=2, method=PICKY, profile="paper", merge="deltas"))
            clients = await server.clients(2, 4, 6, 8)
            clients[1].train = bad_at_first
            go = held_back(clients[3])
            running = Running(clients)
            await server.until(lambda: server.store.thrown_out(run.run_id))
            go.set()
            assert await running.end() == ["finished"] * 4
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "rejected", "updated", "updated"]
            assert 1 in clients[1].cancelled
            assert 1 not in clients[3].cancelled

    asyncio.run(scenario())


def test_a_merge_is_done_anew_with_those_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All, each alone, and all but one.
    monkeypatch.setattr(PickyBuffer, "failures", 1 + 2 + 2)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(buffered(2, 3, rounds=2, method=PICKY, profile="paper", merge="deltas"))
            clients = await server.clients(2, 4, 8)
            go = held_back(clients[2])
            running = Running(clients)
            await server.until(lambda: len(server.store.thrown_out(run.run_id)) == 2)
            go.set()
            assert await running.end() == ["finished"] * 3
            assert [client.cancelled.count(1) for client in clients] == [1, 1, 0]
            assert [member.strikes for member in server.store.members(run.run_id)] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_change_that_the_server_has_lost_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(1, 2, rounds=2, profile="paper", merge="deltas"))
            clients = await server.clients(4, 8)
            go = held_back(clients[1])
            running = Running(clients)
            await server.until(lambda: server.coordinator.round is not None)
            with held_merge(server):
                await server.until(lambda: server.coordinator.waiting_for == "the merge")
                (tmp_path / "blobs" / clients[0].receipts[1].payload.hex()).unlink()
            await server.until(lambda: merged(server, 1))
            go.set()
            assert await running.end() == ["finished"] * 2
            assert merges(server)[0] == [(0, "trained", 0)]

    asyncio.run(scenario())


def test_a_finished_run_goes_on_with_more_merges(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(buffered(2, 2, rounds=2))
            clients = await server.clients(4, 8)
            assert await run_all(clients) == ["finished"] * 2
            with pytest.raises(ConfigError, match="asynchronous defines what run 'small' computes"):
                await server.coordinator.controls.configure(run.run_id, "asynchronous = 1", [])
            await server.coordinator.controls.configure(run.run_id, "rounds = 4", [])
            assert await run_all(clients) == ["finished"] * 2
            assert len(merges(server)) == 4

    asyncio.run(scenario())


def test_the_operator_sees_who_is_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(buffered(2, 3, rounds=3))
            clients = await server.clients(2, 4, 8)
            go = held_after(clients, [1, 1, 0])
            running = Running(clients)
            await server.until(lambda: merged(server, 1))
            await server.until(lambda: "3 boards at work" in server.coordinator.waiting_for)
            status = await asyncio.to_thread(stored_status, server.store)
            shown = io.StringIO()
            console(shown).print(status_table(status))
            assert "merge 2 has 0 of 2 updates, 3 boards at work" in shown.getvalue()
            assert [client.staleness for client in status.clients] == [0, 0, 1]
            status.clients[2].connected = True
            shown = io.StringIO()
            console(shown).print(status_table(status))
            assert "selected, 1 behind" in shown.getvalue()
            go.set()
            await running.end()
            last = server.store.last_metrics(server.store.list_runs()[0].run_id, 2)
            rows = run_history(server.store, server.store.list_runs()[0])
            assert rows["staleness"][1:] == [metrics["staleness"] or None for metrics in reversed(last)]

    asyncio.run(scenario())


def test_front_ends_do_not_go_with_it(tmp_path: Path) -> None:
    """A leader refuses such a run, and one that is in its store waits with the reason."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            queue = RunQueue(server.store, server.coordinator.blobs, lambda: None, alone=False)
            with pytest.raises(ConfigError, match="asynchronous = 2 does not go with front-ends"):
                await queue.add(buffered(2, 2))
            server.coordinator._alone = False
            server.queue(buffered(2, 2))
            await server.until(lambda: server.store.list_runs()[0].state == "paused")
            assert "serve run 'small' by one server, without --role" in server.store.list_runs()[0].reason

    asyncio.run(scenario())
