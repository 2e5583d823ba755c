"""Enrolments come at a bounded rate and leave their lines in the log; who has a good token is let in."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.enrolment_calls import (
    FAILED_EACH,
    GIVEN_EACH,
    LINES,
    LINES_SECONDS,
    RETRY_AFTER,
    RefusalLog,
)
from fedmpq.server.rate_limit import MAX_ADDRESSES, Rate, RateLimit, address_of
from fedmpq.server.tokens import token_digest, token_id_of
from tests.server.loopback import Federation, federation
from tests.server.stand_in import StandIn
from tests.server.test_transfer_queue import Clock

WRONG = "fmq_" + "A" * 43


async def enrolled(client: StandIn, token: str, *names: str) -> list[grpc.aio.AioRpcError | None]:
    """Enrolments under these names, a few at a time; what each was refused with."""

    async def one(name: str) -> grpc.aio.AioRpcError | None:
        try:
            async with few:
                await client.stub.Enroll(pb.EnrollRequest(token=token, name=name, budget=4))
        except grpc.aio.AioRpcError as error:
            return error
        return None

    few = asyncio.Semaphore(10)
    return await asyncio.gather(*(one(name) for name in names))


def names(count: int) -> list[str]:
    return [f"board-{number}" for number in range(count)]


def codes(answers: list[grpc.aio.AioRpcError | None]) -> list[grpc.StatusCode | None]:
    return [None if answer is None else answer.code() for answer in answers]


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [record.__dict__["facts"] for record in caplog.records if record.getMessage() == event]


def test_guesses_are_slowed_down_and_shut_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client, token = StandIn(server.address, "any"), server.token()
            answers = await enrolled(client, WRONG, *names(10 * FAILED_EACH.burst))
            limited = [error for error in answers if error is not None]
            looked_up = codes(answers).count(grpc.StatusCode.UNAUTHENTICATED)
            # A busy machine is slow, and one more is looked at every few seconds.
            assert FAILED_EACH.burst <= looked_up < 2 * FAILED_EACH.burst
            assert codes(answers).count(grpc.StatusCode.RESOURCE_EXHAUSTED) == len(answers) - looked_up
            hints = [dict(error.trailing_metadata() or ()).get(RETRY_AFTER) for error in limited]
            assert {hint for hint in hints if hint is not None} <= {"1", "2", "3"}
            assert sum(hint is not None for hint in hints) == len(answers) - looked_up
            assert await enrolled(client, token, "honest") == [None]
            (line,) = lines(caplog, "client enrolled")
            assert (line["client"], line["token"]) == ("honest", token_id_of(token_digest(token)))
            assert line["address"] == "127.0.0.1"
            assert len(lines(caplog, "enrolment refused")) == LINES
            assert not any(
                text in str(record.__dict__) for record in caplog.records for text in (token, WRONG)
            )
            await client.close()

    with caplog.at_level(logging.INFO, "fedmpq.server"):
        asyncio.run(scenario())


def test_a_token_for_many_gives_no_flood_of_identities(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client = StandIn(server.address, "any")
            answers = await enrolled(client, server.token(uses=None), *names(2 * GIVEN_EACH.burst))
            given = codes(answers).count(None)
            assert GIVEN_EACH.burst <= given < 1.5 * GIVEN_EACH.burst
            assert len(server.store.list_clients()) == given
            refused = [error for error in answers if error is not None]
            assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            await client.close()

    asyncio.run(scenario())


def test_a_refusal_names_a_token_that_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def tokens(server: Federation) -> tuple[str, list[grpc.StatusCode | None]]:
        client, token = StandIn(server.address, "any"), server.token()
        answers = [*await enrolled(client, token, "first"), *await enrolled(client, token, "second")]
        answers += await enrolled(client, WRONG, "third")
        await client.close()
        return token, codes(answers)

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            token, answers = await tokens(server)
            assert answers == [None, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED]
            used, unknown = lines(caplog, "enrolment refused")
            assert used["token"] == token_id_of(token_digest(token))
            assert "used up" in str(used["reason"])
            assert "token" not in unknown

    with caplog.at_level(logging.INFO, "fedmpq.server"):
        asyncio.run(scenario())


def test_refusals_beyond_a_few_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock = Clock()
        told = RefusalLog(clock)
        for number in range(LINES + 100):
            told.refused(f"10.0.0.{number % 200}", reason="no such token")
        assert len(caplog.records) == LINES
        clock.now += LINES_SECONDS
        told.refused("10.0.0.1", reason="no such token")

    asyncio.run(scenario())
    (more,) = lines(caplog, "more enrolments refused")
    assert more["count"] == 100
    assert len(str(more["addresses"]).split(",")) == LINES
    assert len(lines(caplog, "enrolment refused")) == LINES + 1


# Rates


def test_a_burst_and_then_a_steady_rate() -> None:
    clock = Clock()
    limit = RateLimit(Rate(2, 3.0), Rate(5, 1.0), clock)
    assert [limit.take("a") for _ in range(3)] == [0, 0, 3]
    assert limit.take("b") == 0
    clock.now += 3
    assert [limit.take("a") for _ in range(2)] == [0, 3]
    limit.give_back("a")
    assert limit.take("a") == 0


def test_many_addresses_share_what_there_is_in_all() -> None:
    limit = RateLimit(Rate(2, 3.0), Rate(5, 1.0), Clock())
    assert [limit.take(str(number)) for number in range(6)] == [0, 0, 0, 0, 0, 1]


def test_addresses_are_forgotten_before_they_are_too_many() -> None:
    limit = RateLimit(Rate(1, 1.0), Rate(10 * MAX_ADDRESSES, 1.0), Clock())
    for number in range(2 * MAX_ADDRESSES):
        limit.take(str(number))
    assert len(limit._buckets) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", "127.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:40000", "2001:db8:1:2::/64"),
        ("ipv6:[::1]:40000", "::/64"),
        ("unix:/run/socket", "unix"),
    ],
)
def test_addresses_of_peers(peer: str, address: str) -> None:
    assert address_of(peer) == address
