"""The service over real sockets, as boards and as attackers see it: the hostile change nothing of others'."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq.exchange.wire import digest
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.federation_service import MAX_DOWNLOADS
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
from tests.server.small_model import GRAPH
from tests.server.stand_in import StandIn


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(call, PATIENCE)
    return error.value


_STREAMS: list[Any] = []
"""A stream that nobody holds any more is cancelled."""


async def assigned(client: StandIn) -> pb.Assignment:
    """The client's assignment; its stream stays open until the channel is closed."""
    stream = client.listen()
    _STREAMS.append(stream)
    while True:
        event = await asyncio.wait_for(stream.read(), PATIENCE)
        assert isinstance(event, pb.Event)
        if event.WhichOneof("event") == "run":
            client._graph = Graph.from_bytes(await client.download(event.run.graph_id))
        if event.WhichOneof("event") == "assignment":
            return event.assignment


async def prepared(client: StandIn) -> tuple[pb.Assignment, bytes]:
    """The client's assignment and the update it would send."""
    assignment = await assigned(client)
    return assignment, client.update(assignment, await client.download(assignment.payload))


# Enrolment and identity


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "no spaces"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"name": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"name": "x" * 65}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"budget": 0.5}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"budget": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token": "guess"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"token": "fmq_" + "A" * 43}, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_bad_enrolments_are_refused(tmp_path: Path, changes: dict[str, Any], code: grpc.StatusCode) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            client = StandIn(server.address, "x")
            request = {"token": server.token(), "name": "good", "budget": 4.0, **changes}
            assert (await refused(client.stub.Enroll(pb.EnrollRequest(**request)))).code() is code
            assert server.store.list_clients() == []
            await client.close()

    asyncio.run(scenario())


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (first,) = await server.clients(4)
            second = StandIn(server.address, "client-0")
            error = await refused(second.enrol(server.token()))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            assert "revoke" in (error.details() or "")
            await close_all([first, second])

    asyncio.run(scenario())


def test_every_call_needs_an_identity_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            honest, other = await server.clients(4, 4)
            client_id, secret = honest.identity.split(".")
            others_secret = other.identity.split(".")[1]
            thief = StandIn(server.address, "thief")
            for identity in (
                "",
                "nonsense",
                f"{client_id}.{others_secret}",
                f"{client_id}.{secret[:-1]}",
                f"{'0' * 32}.{secret}",
            ):
                thief.identity = identity
                for call in calls(thief):
                    error = await refused(call())
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED, identity or "none"
            await close_all([honest, other, thief])

    def calls(client: StandIn) -> list[Callable[[], Awaitable[Any]]]:
        return [
            lambda: client.listen().read(),
            lambda: client.download(bytes(32)),
            lambda: client.stub.GetUpload(pb.GetUploadRequest(), metadata=client.metadata),
            lambda: client.upload("r", 1, b"data"),
        ]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_",
    [
        pb.ListenRequest(budget=0, samples=10),
        pb.ListenRequest(budget=float("inf"), samples=10),
        pb.ListenRequest(budget=4, samples=1),
        pb.ListenRequest(budget=4, samples=2**64 - 1),
    ],
)
def test_what_a_client_says_of_itself_is_checked(tmp_path: Path, request_: pb.ListenRequest) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            before = server.store.list_clients()[0].samples
            error = await refused(client.stub.Listen(request_, metadata=client.metadata).read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert server.store.list_clients()[0].samples == before
            await client.close()

    asyncio.run(scenario())


# Streams


async def welcomed(stream: grpc.aio.UnaryStreamCall[pb.ListenRequest, pb.Event]) -> bool:
    event = await asyncio.wait_for(stream.read(), PATIENCE)
    return isinstance(event, pb.Event) and event.HasField("welcome")


def test_the_newest_stream_wins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            old = client.listen()
            assert await welcomed(old)
            new = client.listen()
            assert await welcomed(new)
            error = await refused(old.read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(server.connections) == 1
            await client.close()
            await server.until(lambda: len(server.connections) == 0)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_flood_of_streams_leaves_room_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config()
            server.queue(config)
            first, second, flooder = await server.clients(4, 8, 4)
            server.store.revoke_client("client-2", 0)
            flood = [
                asyncio.ensure_future(refused(channel_flood(server, flooder.identity))) for _ in range(20)
            ]
            assert await run_all([first, second]) == ["finished"] * 2
            for one in flood:
                assert (await one).code() is grpc.StatusCode.UNAUTHENTICATED
            expected = expected_model(config, [(c.budget, c.samples) for c in (first, second)])
            assert same_model(server.model(), expected)
            await flooder.close()

    async def channel_flood(server: Federation, identity: str) -> None:
        client = StandIn(server.address, "flood", identity=identity)
        try:
            await asyncio.gather(*(client.listen().read() for _ in range(30)))
        finally:
            await client.close()

    asyncio.run(scenario())


def test_no_more_clients_than_the_server_takes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path, max_clients=1) as server:
            first, second = await server.clients(4, 4)
            kept = first.listen()
            assert await welcomed(kept)
            error = await refused(second.listen().read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await close_all([first, second])

    asyncio.run(scenario())


def test_a_stopping_server_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            stream = client.listen()
            assert await welcomed(stream)
            server.connections.close_all("stopping")
            assert (await refused(stream.read())).code() is grpc.StatusCode.UNAVAILABLE
            await client.close()

    asyncio.run(scenario())


# Downloads


def test_a_download_goes_on_at_any_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1))
            (client,) = await server.clients(8)
            assignment = await assigned(client)
            whole = await client.download(assignment.payload)
            assert len(whole) == assignment.payload_bytes
            for offset in (1, len(whole) // 2, len(whole) - 1, len(whole)):
                assert await client.download(assignment.payload, offset) == whole[offset:]
            error = await refused(client.download(assignment.payload, len(whole) + 1))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE
            graph = GRAPH.to_bytes()
            assert await client.download(digest(graph), 5) == graph[5:]
            await client.close()

    asyncio.run(scenario())


def test_a_damaged_payload_is_made_again_before_it_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1))
            (client,) = await server.clients(8)
            assignment = await assigned(client)
            whole = await client.download(assignment.payload)
            # As if there were too many for memory.
            server.coordinator.outgoing.held = lambda _: None  # type: ignore[method-assign, assignment]
            (file,) = tmp_path.rglob(assignment.payload.hex())
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert await client.download(assignment.payload) == whole
            assert await client.download(assignment.payload, 7) == whole[7:]
            await client.close()

    asyncio.run(scenario())
    assert "is damaged: its bytes have another hash" in caplog.text


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (b"../../fedmpq.db", grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(32), grpc.StatusCode.NOT_FOUND),
    ],
)
def test_only_payloads_can_be_downloaded(tmp_path: Path, name: bytes, code: grpc.StatusCode) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            (client,) = await server.clients(4)
            assert (await refused(client.download(name))).code() is code
            await client.close()

    asyncio.run(scenario())


def test_the_store_itself_is_no_payload(tmp_path: Path) -> None:
    """The global model and others' updates are blobs too, but not for download."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2))
            first, second = await server.clients(4, 4)
            (_, update), _ = await asyncio.gather(prepared(first), assigned(second))
            await first.upload(run.run_id, 1, update)
            for name in (run.model, digest(update)):
                assert (await refused(second.download(name))).code() is grpc.StatusCode.NOT_FOUND
            await close_all([first, second])

    asyncio.run(scenario())


def test_a_client_has_a_few_downloads_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1))
            (client,) = await server.clients(8)
            assignment = await assigned(client)
            disk, reading = server.coordinator.outgoing.read, threading.Event()

            def slow_disk(*piece: Any) -> bytes:
                reading.wait(PATIENCE)
                return disk(*piece)

            server.coordinator.outgoing.held = lambda _: None  # type: ignore[method-assign, assignment]
            server.coordinator.outgoing.read = slow_disk  # type: ignore[method-assign, assignment]
            calls = [
                asyncio.ensure_future(client.download(assignment.payload)) for _ in range(MAX_DOWNLOADS + 1)
            ]
            done, slow = await asyncio.wait(calls, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            assert [(await refused(call)).code() for call in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            reading.set()
            assert len({len(data) for data in await asyncio.gather(*slow)}) == 1
            assert await client.download(assignment.payload)
            await client.close()

    asyncio.run(scenario())


# Uploads


def test_an_upload_goes_on_where_it_broke(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            _, update = await prepared(client)
            header = pb.UploadHeader(
                run_id=run.run_id, round=1, payload=digest(update), payload_bytes=len(update)
            )
            half = len(update) // 2

            async def broken() -> AsyncIterator[pb.UploadRequest]:
                yield pb.UploadRequest(header=header)
                yield pb.UploadRequest(data=update[:half])
                await asyncio.sleep(PATIENCE)

            call = client.stub.Upload(broken(), metadata=client.metadata)
            client_id = client.identity.split(".")[0]
            await server.until(lambda: server.uploads.stored(client_id, digest(update)) == half)
            call.cancel()
            question = pb.GetUploadRequest(run_id=run.run_id, round=1, payload=digest(update))
            status = await client.stub.GetUpload(question, metadata=client.metadata)
            assert (status.offset, status.HasField("receipt")) == (half, False)
            error = await refused(client.upload(run.run_id, 1, update, half + 1))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE
            receipt = await client.upload(run.run_id, 1, update, half)
            assert receipt.payload == digest(update)
            assert list((tmp_path / "uploads").iterdir()) == []
            await client.close()

    asyncio.run(scenario())


def test_a_newer_upload_takes_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            _, update = await prepared(client)
            half = len(update) // 2

            async def hanging() -> AsyncIterator[pb.UploadRequest]:
                header = pb.UploadHeader(
                    run_id=run.run_id, round=1, payload=digest(update), payload_bytes=len(update)
                )
                yield pb.UploadRequest(header=header)
                yield pb.UploadRequest(data=update[:half])
                await asyncio.sleep(PATIENCE)

            old = asyncio.ensure_future(refused(client.stub.Upload(hanging(), metadata=client.metadata)))
            client_id = client.identity.split(".")[0]
            await server.until(lambda: server.uploads.stored(client_id, digest(update)) == half)
            assert (await client.upload(run.run_id, 1, update)).receipt_id
            assert (await old).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await client.close()

    asyncio.run(scenario())


def test_the_same_update_many_times_is_one_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2, rounds=1))
            first, second = await server.clients(8, 4)
            (_, update), _ = await asyncio.gather(prepared(first), assigned(second))
            again = StandIn(server.address, "again", identity=first.identity)
            receipts = [await client.upload(run.run_id, 1, update) for client in (first, again, first)]
            assert len({receipt.receipt_id for receipt in receipts}) == 1
            other = update + b"\x9a\x06\x01a"
            error = await refused(first.upload(run.run_id, 1, other))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            current = server.store.current_round(run.run_id)
            assert current is not None
            assert [seat.state for seat in current.seats] == ["updated", "selected"]
            await close_all([first, second, again])

    asyncio.run(scenario())


def snapshot(server: Federation, run_id: str) -> tuple[Any, ...]:
    """All the store knows of a run."""
    return (
        server.store.run(run_id),
        server.store.current_round(run_id),
        server.store.members(run_id),
        server.store.blobs_in_use(),
        [replace(client, first_seen=None) for client in server.store.list_clients()],
    )


def test_hostile_uploads_change_nothing(tmp_path: Path) -> None:
    """Each is refused; then the honest update of the same client still counts, as does the model it makes."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            config = small_config(clients_per_round=2, rounds=1, statistics="averaged")
            run = server.queue(config)
            first, second, outsider = await server.clients(8, 4, 4)
            (_, update), (_, others) = await asyncio.gather(prepared(first), prepared(second))
            before = snapshot(server, run.run_id)
            good: dict[str, Any] = {
                "run_id": run.run_id,
                "round": 1,
                "payload": digest(update),
                "payload_bytes": len(update),
            }
            for changes, data, code in (
                ({"payload": b"short"}, update, grpc.StatusCode.INVALID_ARGUMENT),
                ({"payload_bytes": 0}, update, grpc.StatusCode.INVALID_ARGUMENT),
                ({"payload_bytes": 1 << 40}, update, grpc.StatusCode.INVALID_ARGUMENT),
                ({"payload_bytes": len(update) - 1}, update, grpc.StatusCode.INVALID_ARGUMENT),
                ({}, update[:-1], grpc.StatusCode.INVALID_ARGUMENT),
                ({}, update + b"x", grpc.StatusCode.INVALID_ARGUMENT),
                ({"offset": 7}, update, grpc.StatusCode.OUT_OF_RANGE),
                ({"round": 2}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"round": 0}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"round": 2**32 - 1}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"phase": pb.CALIBRATION}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"phase": 7}, update, grpc.StatusCode.INVALID_ARGUMENT),
                ({"run_id": ""}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"run_id": "\0"}, update, grpc.StatusCode.FAILED_PRECONDITION),
                ({"run_id": "x" * 10_000}, update, grpc.StatusCode.FAILED_PRECONDITION),
            ):
                header = pb.UploadHeader(**{**good, **changes})
                error = await refused(first.send_upload(header, data))
                assert error.code() is code, changes
                assert snapshot(server, run.run_id) == before, changes
            error = await refused(outsider.upload(run.run_id, 1, update))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert snapshot(server, run.run_id) == before
            await first.upload(run.run_id, 1, update)
            await second.upload(run.run_id, 1, others)
            await server.until(lambda: server.store.run(run.run_id).state == "finished")
            expected = expected_model(config, [(c.budget, c.samples) for c in (first, second)])
            assert same_model(server.model(), expected)
            await close_all([first, second, outsider])

    asyncio.run(scenario())


def test_streams_that_are_no_uploads_are_refused(tmp_path: Path) -> None:
    async def send(client: StandIn, *requests: pb.UploadRequest) -> grpc.StatusCode:
        async def parts() -> AsyncIterator[pb.UploadRequest]:
            for request in requests:
                yield request

        return (await refused(client.stub.Upload(parts(), metadata=client.metadata))).code()

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1))
            (client,) = await server.clients(8)
            _, update = await prepared(client)
            header = pb.UploadRequest(
                header=pb.UploadHeader(
                    run_id=run.run_id, round=1, payload=digest(update), payload_bytes=len(update)
                )
            )
            before = snapshot(server, run.run_id)
            invalid = grpc.StatusCode.INVALID_ARGUMENT
            assert await send(client) is invalid
            assert await send(client, pb.UploadRequest()) is invalid
            assert await send(client, pb.UploadRequest(data=b"data first")) is invalid
            assert await send(client, header, header) is invalid
            assert await send(client, header, pb.UploadRequest()) is invalid
            too_long = pb.UploadRequest(data=bytes(2 << 20))
            assert await send(client, header, too_long) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert snapshot(server, run.run_id) == before
            await client.close()

    asyncio.run(scenario())


def test_a_wrong_hash_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2))
            first, second = await server.clients(8, 4)
            (_, update), _ = await asyncio.gather(prepared(first), assigned(second))
            header = pb.UploadHeader(
                run_id=run.run_id, round=1, payload=digest(b"other"), payload_bytes=len(update)
            )
            error = await refused(first.send_upload(header, update))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [member.strikes for member in server.store.members(run.run_id)] == [1, 0]
            assert (await refused(first.upload(run.run_id, 1, update))).code() is error.code()
            await close_all([first, second])

    asyncio.run(scenario())


def test_anothers_update_is_rejected(tmp_path: Path) -> None:
    """Replayed by a client that is in the round itself."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=2))
            first, second = await server.clients(4, 4)
            (_, update), _ = await asyncio.gather(prepared(first), assigned(second))
            error = await refused(second.upload(run.run_id, 1, update))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "its sender is" in (error.details() or "")
            await first.upload(run.run_id, 1, update)
            await close_all([first, second])

    asyncio.run(scenario())


HEADERS = st.builds(
    pb.UploadHeader,
    run_id=st.text(max_size=50),
    round=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=40) | st.binary(min_size=32, max_size=32),
    payload_bytes=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
)
REQUESTS = st.lists(
    st.builds(pb.UploadRequest, header=HEADERS) | st.builds(pb.UploadRequest, data=st.binary(max_size=50)),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    uploads=st.lists(REQUESTS, min_size=4, max_size=8),
    questions=st.lists(
        st.builds(
            pb.GetUploadRequest,
            run_id=st.text(max_size=50),
            round=st.integers(0, 2**32 - 1),
            payload=st.binary(max_size=40),
        ),
        max_size=6,
    ),
    downloads=st.lists(
        st.builds(pb.DownloadRequest, payload=st.binary(max_size=40), offset=st.integers(0, 2**64 - 1)),
        max_size=6,
    ),
)
def test_a_fuzzed_client_stops_no_round(
    tmp_path_factory: pytest.TempPathFactory,
    uploads: list[list[pb.UploadRequest]],
    questions: list[pb.GetUploadRequest],
    downloads: list[pb.DownloadRequest],
) -> None:
    async def fuzz(client: StandIn) -> None:
        for requests in uploads:

            async def parts(requests: list[pb.UploadRequest] = requests) -> AsyncIterator[pb.UploadRequest]:
                for request in requests:
                    yield request

            await answered(client.stub.Upload(parts(), metadata=client.metadata))
        for question in questions:
            await answered(client.stub.GetUpload(question, metadata=client.metadata))
        for download in downloads:
            await answered(client.stub.Download(download, metadata=client.metadata).read())

    async def answered(call: Awaitable[Any]) -> None:
        error = await refused(call)
        assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK), error.details()

    async def scenario() -> None:
        async with federation(tmp_path_factory.mktemp("fuzz")) as server:
            config = small_config(clients_per_round=2, rounds=2)
            server.queue(config)
            first, second, hostile = await server.clients(4, 8, 4)
            _, states = await asyncio.gather(fuzz(hostile), run_all([first, second]))
            assert states == ["finished"] * 2
            expected = expected_model(config, [(c.budget, c.samples) for c in (first, second)])
            assert same_model(server.model(), expected)
            await hostile.close()

    asyncio.run(scenario())
