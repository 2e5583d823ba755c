"""Payloads over the network: in chunks, resumed at the byte where they broke, checked by their hash.

A transfer that breaks raises an exception. The caller tries again, and goes on where the last try ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Federation
from fedmpq.edge_client.chunk_length import ChunkLength
from fedmpq.edge_client.outbox import Pending
from fedmpq.exchange.wire import phase_to_message
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.durable_files import HASH_BLOCK, file_digest

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
UploadCall = grpc.aio.StreamUnaryCall[pb.UploadRequest, pb.Receipt]

REFUSAL_SECONDS = 0.5
"""A write that meets a refusal turns it into an internal error of gRPC (its issue 36066): after a broken
upload the header goes ahead, and the data follow when it was not refused."""


class TransferError(RuntimeError):
    """A transfer that broke for a reason other than the connection; a new try may help."""


class StalledError(TransferError):
    """Nothing moved for too long: the connection looks open and is not."""


class Patience(NamedTuple):
    """Seconds to wait: for the next chunk to move, and for the server to check a whole update."""

    chunk: float = 30.0
    receipt: float = 300.0


async def within(seconds: float, moving: Awaitable[T], what: str) -> T:
    """The result of `moving`; raises StalledError if it takes longer than so many seconds.

    asyncio.wait_for would do, but before Python 3.12 it forgets a cancellation that comes with the result.
    """
    task = asyncio.ensure_future(moving)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        await ended(task)
    if not done:
        raise StalledError(f"{what} did not move for {seconds:g} s")
    return task.result()


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancels the task if it still runs and waits for its end; its exception, if any, is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


# Download


def wanted_payload(assignment: pb.Assignment) -> tuple[bytes, int]:
    """The name and length of the payload to take: the one with entropy codes, where the server has it."""
    if assignment.coded_payload:
        return assignment.coded_payload, assignment.coded_bytes
    return assignment.payload, assignment.payload_bytes


async def download(
    stub: Federation,
    metadata: Metadata,
    retry: Backoff,
    payload: bytes,
    size: int,
    path: Path,
    patience: Patience,
    chunks: ChunkLength,
) -> None:
    """Downloads the payload of that hash and size to `path`; until it is whole it is kept as `path`.part."""
    part = path.with_name(f"{path.name}.part")
    digest, offset = _resume(part, size)
    request = pb.DownloadRequest(payload=payload, offset=offset, chunk_bytes=chunks.bytes)
    call = stub.Download(request, metadata=metadata)
    try:
        with _shorter_if_it_breaks(chunks), part.open("ab", buffering=0) as file:
            # The end of the stream is an object of another type.
            while isinstance(chunk := await within(patience.chunk, call.read(), "the download"), pb.Chunk):
                offset += len(chunk.data)
                if offset > size:
                    break
                file.write(chunk.data)
                digest.update(chunk.data)
                chunks.moved()
                retry.reset()
    finally:
        call.cancel()
    if offset < size:
        raise TransferError(f"the download ended at byte {offset} of {size}")
    if offset > size or digest.digest() != payload:
        part.unlink()
        what = f"more than {size} bytes came" if offset > size else "the hash is another"
        raise TransferError(f"payload {payload.hex()[:12]} came damaged: {what}; it begins anew")
    part.replace(path)


@contextmanager
def _shorter_if_it_breaks(chunks: ChunkLength) -> Iterator[None]:
    try:
        yield
    except (grpc.aio.AioRpcError, StalledError, asyncio.CancelledError):
        # Cancelled: the stream has noticed first that the connection broke, and its channel was closed.
        chunks.broke()
        raise


def _resume(part: Path, size: int) -> tuple[hashlib._Hash, int]:
    """The hash and the length of what earlier tries have downloaded."""
    digest, offset = hashlib.sha256(), 0
    if not part.exists():
        return digest, offset
    if part.stat().st_size > size:
        part.unlink()
        return digest, offset
    with part.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
            offset += len(block)
    return digest, offset


def have(path: Path, payload: bytes) -> bool:
    """Whether the file at `path` is that payload; a file that is another is removed."""
    try:
        if file_digest(path) == payload:
            return True
    except FileNotFoundError:
        return False
    path.unlink()
    return False


# Refusal


async def decline(
    stub: Federation, metadata: Metadata, retry: Backoff, request: pb.DeclineRequest, patience: Patience
) -> None:
    """Tells the server that this client cannot take part; one that does not know the call waits in vain."""
    try:
        await within(patience.chunk, stub.Decline(request, metadata=metadata), "the refusal")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise


async def ready(
    stub: Federation, metadata: Metadata, retry: Backoff, request: pb.ReadyRequest, patience: Patience
) -> bool:
    """Tells the server that this client has its data for a run; whether it is a server that wants to know."""
    try:
        await within(patience.chunk, stub.Ready(request, metadata=metadata), "the answer")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return False
    return True


# Upload


async def received(
    stub: Federation, metadata: Metadata, retry: Backoff, pending: Pending, patience: Patience
) -> pb.UploadStatus:
    """How much of the update the server has."""
    key = pending.key
    request = pb.GetUploadRequest(
        run_id=key.run_id, round=key.round, payload=pending.payload, phase=phase_to_message(key.phase)
    )
    return await within(patience.chunk, stub.GetUpload(request, metadata=metadata), "the question")


class Delivery:
    """An upload over several tries; from the second on the server is asked first how much it has."""

    def __init__(self, pending: Pending, chunks: ChunkLength, patience: Patience, resumed: bool) -> None:
        self._pending = pending
        self._chunks = chunks
        self._patience = patience
        self._ask = resumed
        self._offset = 0

    async def __call__(self, stub: Federation, metadata: Metadata, retry: Backoff) -> pb.Receipt:
        """One try. The receipt means that the server has the whole update and will not lose it."""
        if self._ask:
            status = await received(stub, metadata, retry, self._pending, self._patience)
            if status.HasField("receipt"):
                return status.receipt
            if status.offset > self._offset:
                retry.reset()
            self._offset = min(status.offset, self._pending.size)
        first, self._ask = not self._ask, True
        call = stub.Upload(metadata=metadata)
        answer = asyncio.ensure_future(call)
        try:
            with _shorter_if_it_breaks(self._chunks):
                # A server that answers before the end says why in its answer.
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    await self._send(call, answer, REFUSAL_SECONDS if not first else 0.0)
                receipt = await within(self._patience.receipt, answer, "the receipt")
        finally:
            await ended(answer)
        if receipt.payload != self._pending.payload:
            raise TransferError(f"the receipt is of {receipt.payload.hex()[:12]}, not of what was sent")
        return receipt

    async def _send(self, call: UploadCall, answer: asyncio.Future[pb.Receipt], pause: float) -> None:
        """Header and data, until there is an answer; `pause` is for the server to refuse the header."""
        key, seconds = self._pending.key, self._patience.chunk
        header = pb.UploadHeader(
            run_id=key.run_id,
            round=key.round,
            payload=self._pending.payload,
            payload_bytes=self._pending.size,
            offset=self._offset,
            phase=phase_to_message(key.phase),
        )
        await _moved(seconds, call.write(pb.UploadRequest(header=header)), answer)
        await asyncio.wait({answer}, timeout=pause)
        with self._pending.path.open("rb") as file:
            file.seek(self._offset)
            while not answer.done() and (chunk := file.read(self._chunks.bytes)):
                await _moved(seconds, call.write(pb.UploadRequest(data=chunk)), answer)
                self._chunks.moved()
        await _moved(seconds, call.done_writing(), answer)


async def _moved(seconds: float, writing: Awaitable[None], answer: asyncio.Future[pb.Receipt]) -> None:
    """When it is written, or the call is over: a write to a connection that broke may wait for ever."""
    task = asyncio.ensure_future(writing)
    either: set[asyncio.Future[Any]] = {task, answer}
    try:
        done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(task)
    if not done:
        raise StalledError(f"the upload did not move for {seconds:g} s")
    if task in done:
        task.result()
