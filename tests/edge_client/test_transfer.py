"""Transfers by themselves: what is kept, what is asked, and what an ended wait leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint, Federation, federation
from fedmpq.edge_client.chunk_length import (
    DEFAULT_CHUNK,
    LARGEST_CHUNK,
    LEAST_CHUNK,
    MOVED_TO_GROW,
    ChunkLength,
)
from fedmpq.edge_client.outbox import Outbox, Pending, RoundKey
from fedmpq.edge_client.transfer import (
    Delivery,
    Patience,
    StalledError,
    TransferError,
    _shorter_if_it_breaks,
    download,
    have,
    within,
)
from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import digest
from fedmpq.proto import federation_pb2 as pb
from tests.edge_client.fake_federation import CHUNK, FakeFederation, RunningServer, cut_after, refuse

T = TypeVar("T")
DATA = bytes(range(256)) * 20
NAME = digest(DATA)
METADATA = (("authorization", "Bearer board.secret"),)
PATIENCE = Patience(5.0, 5.0)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    fake = FakeFederation()
    fake.identities["board"] = "secret"
    fake.payloads[NAME] = DATA
    running = RunningServer(fake)
    yield running
    running.stop()


@pytest.fixture
def pending(tmp_path: Path) -> Pending:
    return Outbox(tmp_path / "outbox").put(RoundKey("run-1", 2, "training", NAME), DATA)


def call(server: RunningServer, action: Callable[[Federation], Awaitable[T]]) -> T:
    async def play() -> T:
        async with Endpoint(server.address).open() as channel:
            return await asyncio.wait_for(action(federation(channel)), 30)

    return asyncio.run(play())


def fetch(
    server: RunningServer, path: Path, size: int = len(DATA), chunks: ChunkLength | None = None
) -> None:
    chunks = chunks or ChunkLength()
    call(server, lambda stub: download(stub, METADATA, Backoff(1, 1), NAME, size, path, PATIENCE, chunks))


def send(server: RunningServer, delivery: Delivery) -> pb.Receipt:
    return call(server, lambda stub: delivery(stub, METADATA, Backoff(1, 1)))


def delivery_of(pending: Pending, chunk: int = 1000, resumed: bool = False) -> Delivery:
    return Delivery(pending, ChunkLength(chunk), PATIENCE, resumed)


# Download


@pytest.mark.parametrize("kept", [0, 1, 700, len(DATA) - 1, len(DATA)])
def test_only_what_is_missing_comes(server: RunningServer, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model"
    (tmp_path / "model.part").write_bytes(DATA[:kept])
    fetch(server, path)
    assert path.read_bytes() == DATA
    assert server.federation.offsets("Download") == [kept]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_came_before_a_cut_is_kept(server: RunningServer, tmp_path: Path) -> None:
    server.federation.faults.download = [cut_after(10 * CHUNK)]
    with pytest.raises(grpc.aio.AioRpcError):
        fetch(server, tmp_path / "model")
    assert (tmp_path / "model.part").read_bytes() == DATA[: 10 * CHUNK]
    assert not (tmp_path / "model").exists()


def test_a_part_that_is_too_long_is_no_part_of_it(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(DATA + b"?")
    fetch(server, tmp_path / "model")
    assert server.federation.offsets("Download") == [0]
    assert (tmp_path / "model").read_bytes() == DATA


def test_a_part_of_something_else_is_found_out_and_removed(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(b"?" * 500)
    with pytest.raises(TransferError, match="the hash is another"):
        fetch(server, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_ends_early_or_late_is_no_payload(server: RunningServer, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=f"ended at byte {len(DATA)} of {len(DATA) + 5}"):
        fetch(server, tmp_path / "model", len(DATA) + 5)
    (tmp_path / "model.part").unlink()
    with pytest.raises(TransferError, match="more than 5 bytes came"):
        fetch(server, tmp_path / "model", 5)
    assert list(tmp_path.iterdir()) == []


def test_a_file_counts_only_with_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "model"
    assert not have(path, NAME)
    path.write_bytes(DATA)
    assert have(path, NAME)
    path.write_bytes(DATA[:-1])
    assert not have(path, NAME)
    assert not path.exists()


# Upload


@pytest.mark.parametrize("chunk", [64, 999, 1000, len(DATA), len(DATA) + 1])
def test_an_update_arrives_in_chunks_of_any_length(
    server: RunningServer, pending: Pending, chunk: int
) -> None:
    receipt = send(server, delivery_of(pending, chunk))
    assert (receipt.run_id, receipt.round, receipt.payload) == ("run-1", 2, NAME)
    assert server.federation.uploads == {NAME: DATA}
    assert server.federation.calls == [("Upload", 0)]


def test_a_second_try_asks_and_goes_on(server: RunningServer, pending: Pending) -> None:
    server.federation.faults.upload = [cut_after(3000)]
    delivery = delivery_of(pending)
    with pytest.raises(grpc.aio.AioRpcError):
        send(server, delivery)
    receipt = send(server, delivery)
    stored = server.federation.offsets("Upload")[1]
    assert stored >= 3000
    assert server.federation.calls == [("Upload", 0), ("GetUpload", 0), ("Upload", stored)]
    assert send(server, delivery) == receipt
    assert server.federation.count("Upload") == 2


@pytest.mark.parametrize(("phase", "number"), [("training", pb.TRAINING), ("calibration", pb.CALIBRATION)])
def test_question_and_header_name_the_phase(
    server: RunningServer, tmp_path: Path, phase: Phase, number: pb.Phase
) -> None:
    pending = Outbox(tmp_path / "outbox").put(RoundKey("run-1", 2, phase, NAME), DATA)
    receipt = send(server, delivery_of(pending, resumed=True))
    assert (receipt.round, receipt.phase) == (2, number)
    assert server.federation.phases == [("GetUpload", number), ("Upload", number)]


def test_all_bytes_there_but_no_receipt_needs_no_data(server: RunningServer, pending: Pending) -> None:
    server.federation.uploads[NAME] = DATA
    assert send(server, delivery_of(pending, resumed=True)).payload == NAME
    assert server.federation.calls == [("GetUpload", 0), ("Upload", len(DATA))]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_refusal_at_the_header_is_heard_at_the_second_try_at_latest(
    server: RunningServer, pending: Pending, code: grpc.StatusCode
) -> None:
    fault = refuse(code, "not wanted")
    server.federation.faults.upload = [lambda _, context: fault(context)] * 2
    delivery = delivery_of(pending, 64)
    codes = []
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            send(server, delivery)
        codes.append(caught.value.code())
    assert codes[1] is code


def test_a_receipt_of_something_else_is_none(server: RunningServer, pending: Pending) -> None:
    server.federation.receipts[NAME] = pb.Receipt(payload=digest(b"another"))
    with pytest.raises(TransferError, match="the receipt is of"):
        send(server, delivery_of(pending))


# Waiting


def test_a_wait_gives_the_result_or_says_what_stalled() -> None:
    async def play() -> None:
        assert await within(5, asyncio.sleep(0, "moved"), "it") == "moved"
        with pytest.raises(StalledError, match=r"the chunk did not move for 0\.01 s"):
            await within(0.01, asyncio.sleep(60), "the chunk")
        with pytest.raises(KeyError):
            await within(5, failing(), "it")

    async def failing() -> None:
        raise KeyError

    asyncio.run(play())


def test_a_cancellation_is_not_forgotten_when_the_result_comes_with_it() -> None:
    async def play() -> None:
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiter = asyncio.create_task(within(5, result, "it"))
        await asyncio.sleep(0)
        result.set_result("too late")
        waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()

    asyncio.run(play())


# Chunks


def test_chunks_fit_a_message() -> None:
    chunks = ChunkLength()
    for wished, given in ((0, DEFAULT_CHUNK), (4096, 4096), (1 << 30, LARGEST_CHUNK)):
        chunks.wish(wished)
        assert chunks.bytes == given
    assert pb.UploadRequest(data=bytes(LARGEST_CHUNK)).ByteSize() < 1 << 20


def test_chunks_are_shorter_after_every_break_and_grow_again() -> None:
    chunks = ChunkLength(4 * LEAST_CHUNK)
    lengths = []
    for _ in range(4):
        lengths.append(chunks.bytes)
        chunks.broke()
    assert lengths == [4 * LEAST_CHUNK, 2 * LEAST_CHUNK, LEAST_CHUNK, LEAST_CHUNK]
    chunks.wish(8 * LEAST_CHUNK)
    assert chunks.bytes == LEAST_CHUNK
    for _ in range(5 * MOVED_TO_GROW):
        chunks.moved()
    assert chunks.bytes == 8 * LEAST_CHUNK


def test_a_broken_download_asks_for_shorter_chunks(server: RunningServer, tmp_path: Path) -> None:
    server.federation.faults.download = [cut_after(10 * CHUNK)]
    chunks = ChunkLength(4096)
    with pytest.raises(grpc.aio.AioRpcError):
        fetch(server, tmp_path / "model", chunks=chunks)
    fetch(server, tmp_path / "model", chunks=chunks)
    assert server.federation.wished == [4096, 2048]


def test_a_transfer_that_is_cancelled_with_its_channel_counts_as_broken() -> None:
    """The stream may notice first that a connection is gone; else an update in one message never arrives."""
    chunks = ChunkLength(4 * LEAST_CHUNK)
    with pytest.raises(asyncio.CancelledError), _shorter_if_it_breaks(chunks):
        raise asyncio.CancelledError
    assert chunks.bytes == 2 * LEAST_CHUNK
