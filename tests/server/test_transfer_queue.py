"""Transfers take turns by identity: who stalls or drips holds up nobody."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from fedmpq.exchange.wire import digest
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.federation_service import MAX_DOWNLOADS
from fedmpq.server.transfer_queue import KEPT_SECONDS, SHARES, TICK_BYTES, TransferQueue
from fedmpq.system.durable_files import file_digest
from tests.server.loopback import PATIENCE, Federation, close_all, federation, small_config
from tests.server.stand_in import StandIn
from tests.server.test_federation_service import prepared

FEW_SECONDS = 12.0
"""For a busy machine; on an idle one it takes two. Before, it took 29 and more."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def taken(queue: TransferQueue, identity: str, order: list[str], *, upload: bool = False) -> None:
    """A transfer that notes when it is let in."""
    async with queue.transfer(identity, upload=upload) as transfer:
        await transfer.work()
        order.append(identity)


async def in_line(queue: TransferQueue, order: list[str], *identities: str) -> list[asyncio.Task[None]]:
    tasks = []
    for identity in identities:
        tasks.append(asyncio.create_task(taken(queue, identity, order)))
        await asyncio.sleep(0)
    return tasks


def test_identities_take_turns_however_many_calls_they_make() -> None:
    async def scenario() -> None:
        queue, order = TransferQueue(1), list[str]()
        async with queue.transfer("first", upload=False) as first:
            await first.work()
            tasks = await in_line(queue, order, "many", "many", "many", "one", "two")
        await asyncio.gather(*tasks)
        assert order == ["many", "one", "two", "many", "many"]

    asyncio.run(scenario())


def test_an_identity_is_at_work_once_at_a_time() -> None:
    async def scenario() -> None:
        queue, order = TransferQueue(3), list[str]()
        async with queue.transfer("same", upload=False) as first:
            await first.work()
            tasks = await in_line(queue, order, "same", "other")
            await asyncio.wait_for(tasks[1], PATIENCE)
            assert order == ["other"]
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


@pytest.mark.parametrize("away", [KEPT_SECONDS / 2, 2 * KEPT_SECONDS])
def test_a_retry_keeps_its_place_for_a_while(away: float) -> None:
    async def scenario() -> None:
        clock, order = Clock(), list[str]()
        queue = TransferQueue(1, clock)
        async with queue.transfer("first", upload=False) as first:
            await first.work()
            broken, *tasks = await in_line(queue, order, "honest", "later")
            broken.cancel()
            await asyncio.wait({broken})
            clock.now += away
            tasks += await in_line(queue, order, "honest")
        await asyncio.gather(*tasks)
        assert order == (["honest", "later"] if away < KEPT_SECONDS else ["later", "honest"])

    asyncio.run(scenario())


def test_no_line_is_left_out() -> None:
    """Uploads go first, but a download gets its share while they wait."""

    async def scenario() -> None:
        queue, order = TransferQueue(1), list[str]()
        async with queue.transfer("first", upload=False) as first:
            await first.work()
            names = [f"upload-{number}" for number in range(9)]
            tasks = [asyncio.create_task(taken(queue, name, order, upload=True)) for name in names]
            tasks += await in_line(queue, order, "download")
        await asyncio.gather(*tasks)
        assert order.index("download") < len(SHARES)

    asyncio.run(scenario())


def test_who_stalls_gives_its_slot_up_and_gets_it_back_by_moving() -> None:
    async def scenario() -> None:
        queue, order = TransferQueue(1), list[str]()
        async with queue.transfer("stalled", upload=True) as stalled:
            await stalled.work()
            with stalled.waiting():
                tasks = await in_line(queue, order, "honest")
                await asyncio.wait_for(tasks[0], PATIENCE)
            assert queue.is_slow("stalled")
            await stalled.work()
            with stalled.waiting():
                await asyncio.wait_for(taken(queue, "another", order), PATIENCE)
            stalled.moved(10 * TICK_BYTES)
            end = time.monotonic() + PATIENCE
            while queue.is_slow("stalled") and time.monotonic() < end:
                await stalled.work()
                with stalled.waiting():
                    await asyncio.sleep(0.01)
                stalled.moved(TICK_BYTES)
            assert not queue.is_slow("stalled")

    asyncio.run(scenario())


# Over real sockets


@asynccontextmanager
async def kept_up(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Tasks that go on for ever, until the block ends."""
    try:
        yield
        broken = [task for task in tasks if task.done()]
        assert not broken, broken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def leave_downloads_unread(client: StandIn, payload: bytes, begun: asyncio.Event) -> None:
    """As many as a client may have, none of which is read; every ten seconds another in the place of one."""
    request = pb.DownloadRequest(payload=payload)
    calls: list[grpc.aio.UnaryStreamCall[pb.DownloadRequest, pb.Chunk]] = []
    try:
        while True:
            while len(calls) < MAX_DOWNLOADS:
                calls.append(client.stub.Download(request, metadata=client.metadata))
            await asyncio.sleep(1)
            begun.set()
            await asyncio.sleep(9)
            calls.pop(0).cancel()
    finally:
        for call in calls:
            call.cancel()


async def drip(client: StandIn, assignment: pb.Assignment, update: bytes, begun: asyncio.Event) -> None:
    """An upload of a byte a second."""

    async def parts() -> AsyncIterator[pb.UploadRequest]:
        name = digest(update)
        header = pb.UploadHeader(run_id=assignment.run_id, round=1, payload=name, payload_bytes=len(update))
        yield pb.UploadRequest(header=header)
        for number in range(len(update)):
            yield pb.UploadRequest(data=update[number : number + 1])
            begun.set()
            await asyncio.sleep(1)

    await client.stub.Upload(parts(), metadata=client.metadata)


def lend_large_file(server: Federation, folder: Path) -> bytes:
    """Longer than what the network takes for a client that does not read; it has no bytes on the disk."""
    path = folder / "large"
    path.touch()
    os.truncate(path, 1 << 26)
    name = file_digest(path)
    server.coordinator.outgoing.lend(name, path)
    return name


async def seconds_to_deliver(client: StandIn, assignment: pb.Assignment) -> float:
    """The honest board's way from the download to its receipt."""
    began = time.monotonic()
    payload = await asyncio.wait_for(client.download(assignment.payload), PATIENCE)
    update = client.update(assignment, payload)
    assert (await asyncio.wait_for(client.upload(assignment.run_id, 1, update), PATIENCE)).receipt_id
    return time.monotonic() - began


def test_unread_downloads_starve_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1, min_clients=1, rounds=1))
            honest, *hostile = await server.clients(8, *(10 * [4]))
            assignment, _ = await prepared(honest)
            payload = lend_large_file(server, tmp_path)
            begun = [asyncio.Event() for _ in hostile]
            attacks = [
                asyncio.create_task(leave_downloads_unread(client, payload, event))
                for client, event in zip(hostile, begun, strict=True)
            ]
            async with kept_up(*attacks):
                await asyncio.gather(*(event.wait() for event in begun))
                assert await seconds_to_deliver(honest, assignment) < FEW_SECONDS
            await close_all([honest, *hostile])

    asyncio.run(scenario())


def test_dripping_uploads_delay_nobody_for_long(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=31, rounds=1))
            clients = await server.clients(*(31 * [4]))
            offered = await asyncio.gather(*(prepared(client) for client in clients))
            begun = [asyncio.Event() for _ in clients[1:]]
            attacks = [
                asyncio.create_task(drip(client, assignment, update, event))
                for client, (assignment, update), event in zip(clients[1:], offered[1:], begun, strict=True)
            ]
            async with kept_up(*attacks):
                await asyncio.gather(*(event.wait() for event in begun))
                assert await seconds_to_deliver(clients[0], offered[0][0]) < FEW_SECONDS
            await close_all(clients)

    asyncio.run(scenario())
