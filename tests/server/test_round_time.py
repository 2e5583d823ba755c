"""Deadlines under clocks that jump: within a process, and from one process to the next."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.round_time import RoundTime, Timing, time_left
from fedmpq.server.store.records import OpenedRound, RoundAddress
from tests.server.loopback import PATIENCE, Federation, close_all, federation, small_config
from tests.server.stand_in import StandIn, held_back

YEARS = 10 * 365 * 86400.0
DAY = 86400.0


class Hands:
    """A clock that a test turns."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def opened(at: float, deadline: float | None) -> OpenedRound:
    return OpenedRound(RoundAddress("run", 1), "open", at, deadline, 0, ())


def test_the_wall_clock_does_not_count_within_a_process() -> None:
    wall, steady = Hands(1000.0), Hands(50.0)
    counted = RoundTime(wall, steady, opened(1000.0, 1060.0), 60.0, new=True)
    wall.at -= YEARS
    assert (counted.left, counted.elapsed) == (60.0, 0.0)
    wall.at += 2 * YEARS
    steady.at += 59.0
    assert counted.left == 1.0
    steady.at += 1.0
    assert counted.is_late
    assert (counted.elapsed, counted.waited) == (60.0, 60.0)


def test_after_a_restart_a_round_has_what_is_left_of_its_time() -> None:
    counted = RoundTime(Hands(1040.0), Hands(7.0), opened(1000.0, 1060.0), 60.0, new=False)
    assert (counted.left, counted.elapsed, counted.waited) == (20.0, 40.0, 0.0)


@given(deadline=st.floats(-1e12, 1e12), now=st.floats(-1e12, 1e12), whole=st.floats(0.001, 1e9))
def test_what_is_left_is_more_than_nothing_and_no_more_than_the_whole(
    deadline: float, now: float, whole: float
) -> None:
    left = time_left(deadline, now, whole)
    assert left is not None
    assert 0 < left <= whole


def test_a_round_without_a_time_waits_and_one_that_is_given_one_has_all_of_it() -> None:
    assert time_left(1060.0, 1000.0, 0.0) is None
    assert time_left(None, 1000.0, 60.0) == 60.0


def test_the_slowest_answer_counts_from_the_place_and_only_if_all_was_seen() -> None:
    steady = Hands(0.0)
    counted = RoundTime(Hands(1000.0), steady, opened(1000.0, None), 0.0, new=True)
    assert counted.timing() == Timing(0.0, None)
    steady.at = 5.0
    counted.answered(0)
    counted.placed(1)
    steady.at = 9.0
    counted.answered(1)
    assert counted.timing() == Timing(9.0, 5.0)
    taken_up = RoundTime(Hands(1000.0), steady, opened(1000.0, None), 0.0, new=False)
    taken_up.answered(0)
    assert taken_up.timing().slowest is None


async def never(assignment: pb.Assignment) -> None:
    """A client that takes its work and is not heard of again."""


def test_a_clock_that_jumps_back_does_not_hold_a_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(quorum=0.5, deadline_seconds=1, calibration_seconds=1, rounds=1))
            clients = await server.clients(4, 4)
            clients[1].work = never  # type: ignore[method-assign]
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: server.coordinator.round is not None)
            server.clock_error = -DAY
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "cut"]
            assert 0 <= stored.metrics["seconds"] < PATIENCE
            await close_all(clients)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [YEARS, -YEARS])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_jumps_does_not_cut_a_punctual_board(
    tmp_path: Path, error: float, restarted: bool
) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(quorum=0.5, deadline_seconds=300, rounds=1, profile="paper"))
            clients = await server.clients(4, 4)
            starts = [held_back(client) for client in clients]
            running = [asyncio.create_task(client.run()) for client in clients]
            await server.until(lambda: server.coordinator.round is not None)
            if restarted:
                await server.crash()
            server.clock_error = error
            if restarted:
                await server.start()
                await server.until(lambda: server.coordinator.round is not None)
            assert_bounded(server, run.run_id)
            for start, client in zip(starts, clients, strict=True):
                start.set()
                await server.until(receipt_of(client))
            assert await asyncio.wait_for(asyncio.gather(*running), PATIENCE) == ["finished"] * 2
            stored = server.store.round(run.run_id, 1)
            assert [seat.state for seat in stored.seats] == ["updated", "updated"]
            assert 0 <= stored.metrics["seconds"] < 300
            await close_all(clients)

    asyncio.run(scenario())


def receipt_of(client: StandIn) -> Any:
    return lambda: 1 in client.receipts


def assert_bounded(server: Federation, run_id: str) -> None:
    """The round has no more than its time, in this process and, once restarted, in the store."""
    current, stored = server.coordinator.round, server.store.current_round(run_id)
    assert current is not None
    assert stored is not None
    assert current.time.left is not None
    assert 0 < current.time.left <= 300
    if not current.time.is_new:
        assert stored.deadline is not None
        assert 0 < stored.deadline - time.time() - server.clock_error <= 300
