"""What nobody can use any more leaves the disk: parts of uploads, and model files of earlier rounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedmpq.exchange.wire import digest
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.blobs import OFFER_SECONDS, READ_SECONDS, Outgoing
from fedmpq.server.exports import KEPT_OFFERS, Exports
from fedmpq.server.store.records import Run
from tests.server.loopback import PATIENCE, Federation, close_all, federation, small_config
from tests.server.stand_in import StandIn
from tests.server.test_federation_service import prepared, refused
from tests.server.test_transfer_queue import Clock

LARGE = 8 << 20

# Parts of uploads


async def begin_upload(server: Federation, client: StandIn, assignment: pb.Assignment, update: bytes) -> Any:
    """An upload that stops half-way; the open call."""
    header = pb.UploadHeader(
        run_id=assignment.run_id, round=1, payload=digest(update), payload_bytes=len(update)
    )

    async def parts() -> AsyncIterator[pb.UploadRequest]:
        yield pb.UploadRequest(header=header)
        yield pb.UploadRequest(data=update[:10])
        await asyncio.sleep(PATIENCE)

    call = client.stub.Upload(parts(), metadata=client.metadata)
    client_id = client.identity.split(".")[0]
    await server.until(lambda: server.uploads.stored(client_id, digest(update)) == 10)
    return call


def uploads_in(folder: Path) -> list[str]:
    """Whose they are."""
    return sorted(path.name.partition(".")[0] for path in (folder / "uploads").iterdir())


def test_parts_of_uploads_go_with_their_round(tmp_path: Path) -> None:
    """Its sender is not told that the server failed, but that it came too late."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, over_selection=1.0, min_clients=2, rounds=1))
            first, second = await server.clients(8, 4)
            (_, update), (late, others) = await asyncio.gather(prepared(first), prepared(second))
            call = await begin_upload(server, second, late, others)
            await first.upload(run.run_id, 1, update)
            await server.until(lambda: server.store.round(run.run_id, 1).state == "committed")
            await server.until(lambda: uploads_in(tmp_path) == [])
            call.cancel()
            error = await refused(second.upload(run.run_id, 1, others, 10))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            await close_all([first, second])

    asyncio.run(scenario())


def test_parts_of_uploads_go_with_their_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run = server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            call = await begin_upload(server, client, *await prepared(client))
            await server.coordinator.controls.abort(run.run_id)
            await server.until(lambda: uploads_in(tmp_path) == [])
            call.cancel()
            await client.close()

    asyncio.run(scenario())


def test_a_restart_keeps_what_can_be_gone_on_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with federation(tmp_path) as server:
            server.queue(small_config(clients_per_round=1, rounds=1))
            (client,) = await server.clients(8)
            assignment, update = await prepared(client)
            await begin_upload(server, client, assignment, update)
            await server.crash()
            (tmp_path / "uploads" / f"{'f' * 32}.{digest(b'gone').hex()}").write_bytes(b"x")
            await server.start()
            await server.until(lambda: server.coordinator.round is not None)
            await server.until(lambda: uploads_in(tmp_path) == [client.identity.split(".")[0]])
            again = StandIn(server.address, "again", identity=client.identity)
            assert (await again.upload(assignment.run_id, 1, update, 10)).receipt_id
            await close_all([client, again])

    asyncio.run(scenario())


def test_a_restart_with_nothing_to_do_clears_them_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "uploads").mkdir()
        (tmp_path / "uploads" / f"{'f' * 32}.{digest(b'gone').hex()}").write_bytes(b"x")
        async with federation(tmp_path) as server:
            await server.until(lambda: uploads_in(tmp_path) == [])

    asyncio.run(scenario())


# Model files


def model_of(number: int) -> bytes:
    """Longer than what the network takes for a client that does not read."""
    return bytes([number]) * LARGE


def export(folder: Path, run: Run, number: int, name: str = "client-0") -> bytes:
    """What the exporter leaves for round `number`; the file's name on the wire."""
    made = folder / "exports" / f"{run.run_id}-{number}-onnx"
    made.mkdir(parents=True)
    data = model_of(number)
    (made / f"{name}.onnx").write_bytes(data)
    card = {"suffix": ".onnx", "sha256": digest(data).hex(), "clients": [0]}
    (made / f"{name}.onnx.json").write_text(json.dumps(card))
    return digest(data)


def exported(folder: Path) -> list[int]:
    """Of which rounds there are files."""
    return sorted(int(path.name.split("-")[1]) for path in (folder / "exports").iterdir())


def test_files_of_earlier_rounds_go_but_not_under_a_download(tmp_path: Path) -> None:
    """Over real sockets: a board that is slow gets the file it was offered, whole."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            clock = Clock()
            server.coordinator.outgoing._clock = clock
            run = server.queue(small_config(clients_per_round=1, rounds=3, statistics="averaged"))
            (client,) = await server.clients(8)
            slow = None
            for number in (1, 2, 3):
                assignment, update = await prepared(client)
                assert assignment.round == number
                await client.upload(run.run_id, number, update)
                await server.until(lambda: server.store.run(run.run_id).ready == number)  # noqa: B023
                name = export(tmp_path, run, number)
                request = pb.GetModelRequest(format="onnx")
                offer = await client.stub.GetModel(request, metadata=client.metadata)
                assert offer.payload == name
                clock.now += 2 * OFFER_SECONDS
                if slow is None:
                    slow = client.stub.Download(pb.DownloadRequest(payload=name), metadata=client.metadata)
                    whole = (await slow.read()).data
            assert exported(tmp_path) == [1, 3]
            assert slow is not None
            while isinstance(chunk := await slow.read(), pb.Chunk):
                whole += chunk.data
            assert whole == model_of(1)
            clock.now += 2 * OFFER_SECONDS
            await server.coordinator.exports.tidy(
                server.store.run(run.run_id), server.coordinator.outgoing, server.store.released_rounds
            )
            assert exported(tmp_path) == [3]
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("away", [0.0, 2 * READ_SECONDS])
def test_the_number_of_folders_is_bounded(tmp_path: Path, away: float) -> None:
    """Boards that ask and do not come, or come and do not read, keep few files for a short time."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            run, clock = server.queue(small_config()), Clock()
            outgoing, exports = Outgoing(tmp_path / "out", clock), Exports(tmp_path, "")
            last = 3 * KEPT_OFFERS
            for number in range(1, last + 1):
                name = export(tmp_path, run, number)
                outgoing.lend(name, tmp_path / "exports" / f"{run.run_id}-{number}-onnx" / "client-0.onnx")
            with outgoing.reading(name):
                clock.now += away
                await exports.tidy(replace(run, ready=last + 1), outgoing, server.store.released_rounds)
            kept = range(last - KEPT_OFFERS, last + 1) if away == 0 else range(0)
            assert exported(tmp_path) == list(kept)

    asyncio.run(scenario())
