"""The Federation service: what boards call. Each method checks who calls and what it says, then has the
coordinator act on it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from sqlalchemy.exc import DBAPIError

from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import DIGEST_BYTES, WireError, phase_from_message, phase_to_message
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.export_formats import FORMATS
from fedmpq.model.grid import MAX_BITS
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.server.authentication import (
    Context,
    authenticate,
    certificate_name,
    make_secret,
    refuse,
    secret_hash,
)
from fedmpq.server.blobs import Uploads
from fedmpq.server.connections import Announcement, Closing, HubFull
from fedmpq.server.exports import ExportFailed
from fedmpq.server.rounds import Coordinator, DamagedUpload
from fedmpq.server.store import ENDED, Client, NameTaken, Seat, TokenRefused, UpdateRefused
from fedmpq.server.tokens import looks_like_token, token_digest
from fedmpq.server.transfer_limit import Turnstile
from fedmpq.server.validation import Rejected
from fedmpq.system.named_object import is_path

CHUNK_BYTES = 16 << 10
"""A message that broke off half-way is lost whole, so this is how much a cut can cost."""
MAX_DOWNLOADS = 4
"""By one client at a time: some may be left over from connections that broke unnoticed."""
TRANSFERS_AT_ONCE = 8
TURN_SECONDS = 10.0
MAX_SAMPLES = 1 << 40
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_MAX_WORDS = 100
_CLOSINGS: dict[Closing, tuple[grpc.StatusCode, str]] = {
    "replaced": (grpc.StatusCode.RESOURCE_EXHAUSTED, "a newer stream of this client took its place"),
    "revoked": (grpc.StatusCode.UNAUTHENTICATED, "this client was revoked: enrol again with a valid token"),
    "unread": (grpc.StatusCode.RESOURCE_EXHAUSTED, "this client does not read its events"),
    "gone": (grpc.StatusCode.CANCELLED, "the client went away"),
    "stopping": (grpc.StatusCode.UNAVAILABLE, "the server is stopping: retry with back-off"),
}
log = logging.getLogger("fedmpq.server")


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """Errors as status codes; those nobody foresaw are logged here and not explained to the caller."""
    try:
        yield
    except grpc.aio.BaseError:
        # Refused, or its connection broke.
        raise
    except (OSError, DBAPIError) as error:
        log.error("the store failed", extra={"facts": {"error": str(error)}})
        await refuse(
            context, grpc.StatusCode.UNAVAILABLE, "the server cannot store anything now: retry later"
        )
    except Exception:
        log.exception("a call failed")
        await refuse(context, grpc.StatusCode.INTERNAL, "the server failed; its log says why")


@dataclass
class Receiving:
    """An upload under way; a newer one of the same client takes its place."""

    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class FederationService(federation_pb2_grpc.FederationServicer):
    def __init__(self, coordinator: Coordinator, uploads: Uploads) -> None:
        self._coordinator = coordinator
        self._exports = coordinator.exports
        self._store = coordinator.store
        self._uploads = uploads
        self._receiving: dict[str, Receiving] = {}
        self._downloads: Counter[str] = Counter()
        self._turnstile = Turnstile(TRANSFERS_AT_ONCE, TURN_SECONDS)
        self._welcome = pb.Event(
            welcome=pb.Welcome(server_version=version("fedmpq"), chunk_bytes=CHUNK_BYTES)
        )

    # Enroll

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollResponse:
        async with answering(context):
            if not _NAME.fullmatch(request.name):
                await _invalid(context, "a client's name has letters, digits and '_.-', at most 64")
            await _check_budget(context, request.budget)
            if not looks_like_token(request.token):
                await refuse(context, grpc.StatusCode.UNAUTHENTICATED, "that is no enrolment token")
            secret = make_secret()
            try:
                client_id = await asyncio.to_thread(
                    self._store.enrol,
                    token_digest(request.token),
                    request.name,
                    request.budget,
                    _words(request.version),
                    secret_hash(secret),
                    certificate_name(context),
                    time.time(),
                )
            except TokenRefused as error:
                await refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
            except NameTaken as error:
                await refuse(context, grpc.StatusCode.ALREADY_EXISTS, str(error))
            return pb.EnrollResponse(client_id=client_id, secret=secret)

    # Listen

    async def Listen(self, request: pb.ListenRequest, context: Context) -> AsyncIterator[pb.Event]:
        async with answering(context):
            client = await authenticate(context, self._store)
            announcement = await self._announced(client, request, context)
            try:
                connection = self._coordinator.hub.connect(announcement)
            except HubFull as error:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}: retry later")
            try:
                connection.send(self._welcome)
                self._coordinator.greet(connection)
                while (event := await connection.next()) is not None:
                    yield event
            finally:
                self._coordinator.hub.disconnect(connection)
            assert connection.closed is not None
            await refuse(context, *_CLOSINGS[connection.closed])

    async def _announced(self, client: Client, request: pb.ListenRequest, context: Context) -> Announcement:
        await _check_budget(context, request.budget)
        if not MIN_SAMPLES <= request.samples <= MAX_SAMPLES:
            await _invalid(
                context, f"a client trains on {MIN_SAMPLES} samples or more, not on {request.samples}"
            )
        said = (request.budget, request.samples, _words(request.version), _words(request.engine))
        await asyncio.to_thread(self._store.describe_client, client.client_id, *said, time.time())
        return Announcement(client.client_id, client.name, *said)

    # Download

    async def Download(self, request: pb.DownloadRequest, context: Context) -> AsyncIterator[pb.Chunk]:
        async with answering(context):
            client = await authenticate(context, self._store)
            if len(request.payload) != DIGEST_BYTES:
                await _invalid(context, f"a payload is named by {DIGEST_BYTES} bytes")
            if self._downloads[client.client_id] >= MAX_DOWNLOADS:
                await refuse(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MAX_DOWNLOADS} downloads of this client are open, the most it may have: retry later",
                )
            self._downloads[client.client_id] += 1
            try:
                async with self._turnstile.passing(upload=False):
                    at, size = request.offset, await self._size(request, context)
                    while at < size:
                        data = await self._piece(request.payload, at, context)
                        yield pb.Chunk(data=data)
                        at += len(data)
                self._coordinator.note_download(client.client_id)
            finally:
                self._downloads[client.client_id] -= 1
                self._downloads += Counter()

    def _graph(self, name: bytes) -> bytes | None:
        active = self._coordinator.active
        return active.graph_bytes if active is not None and name == active.run.graph else None

    async def _size(self, request: pb.DownloadRequest, context: Context) -> int:
        if (graph := self._graph(request.payload)) is not None:
            size = len(graph)
        else:
            found = await asyncio.to_thread(self._coordinator.outgoing.size, request.payload)
            size = found if found is not None else await self._no_payload(context)
        if request.offset > size:
            message = f"offset {request.offset} is beyond the payload's {size} bytes"
            await refuse(context, grpc.StatusCode.OUT_OF_RANGE, message)
        return size

    async def _piece(self, name: bytes, at: int, context: Context) -> bytes:
        """The file is opened for every piece: a call may be cancelled at any moment, and leaves none open."""
        if (graph := self._graph(name)) is not None:
            return graph[at : at + CHUNK_BYTES]
        data = await asyncio.to_thread(self._coordinator.outgoing.read, name, at, CHUNK_BYTES)
        return data or await self._no_payload(context)

    async def _no_payload(self, context: Context) -> NoReturn:
        if self._coordinator.loading:
            message = "the run is being read from the store: retry"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, message)
        message = "no such payload: the round it belongs to may be over"
        await refuse(context, grpc.StatusCode.NOT_FOUND, message)

    # The client's own model

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.ModelOffer:
        async with answering(context):
            client = await authenticate(context, self._store)
            if request.format not in FORMATS and not is_path(request.format):
                await _invalid(context, f"a model's format is one of {', '.join(FORMATS)}, or the run's own")
            part = await asyncio.to_thread(self._store.latest_part, client.client_id)
            if part is None:
                await refuse(
                    context,
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "this client is in no run that has a model to hand out yet",
                )
            run, number = part
            # Only the operator names code to be loaded, in the run's settings; a board cannot.
            if request.format not in FORMATS and request.format not in run.config.get("export", ()):
                await _invalid(context, f"run {run.name!r} does not export to {request.format!r}")
            try:
                file = await self._exports.model_of(run, number, request.format)
            except ExportFailed as error:
                await refuse(
                    context, grpc.StatusCode.FAILED_PRECONDITION, f"the server cannot export: {error}"
                )
            self._coordinator.outgoing.lend(file.name, file.path)
            return pb.ModelOffer(
                payload=file.name,
                payload_bytes=file.path.stat().st_size,
                file_name=f"{client.name}{file.suffix}",
                card=file.card,
            )

    # Upload

    async def GetUpload(self, request: pb.GetUploadRequest, context: Context) -> pb.UploadStatus:
        async with answering(context):
            client = await authenticate(context, self._store)
            if len(request.payload) != DIGEST_BYTES:
                await _invalid(context, f"a payload is named by {DIGEST_BYTES} bytes")
            phase = await _phase(request.phase, context)
            receipt = await self._receipt(
                client, request.run_id, request.round, phase, request.payload, context
            )
            if receipt is not None:
                return pb.UploadStatus(receipt=receipt)
            stored = await asyncio.to_thread(self._uploads.stored, client.client_id, request.payload)
            return pb.UploadStatus(offset=stored)

    async def _receipt(
        self, client: Client, run_id: str, number: int, phase: Phase, payload: bytes, context: Context
    ) -> pb.Receipt | None:
        """The receipt of an update the server has; None if the client may send it; else it is refused."""
        seat: Seat | None = None
        if len(run_id) <= _MAX_WORDS and "\0" not in run_id and 1 <= number < 1 << 31:
            seat = await asyncio.to_thread(self._store.seat_of, run_id, number, client.client_id, phase)
        if seat is not None and seat.state == "updated" and seat.update == payload:
            return _receipt(run_id, number, phase, payload, seat.receipt_id or "")
        if seat is not None and seat.state == "rejected":
            await _invalid(context, f"this client's update was rejected: {seat.reason}")
        if seat is None or seat.state != "selected":
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, _not_selected(seat, number))
        if self._coordinator.place(client.client_id, run_id, number, phase) is None:
            run = await asyncio.to_thread(self._store.run, run_id)
            if run.state in ENDED:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"the run is {run.state}")
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "the run is being read from the store: retry")
        return None

    async def Upload(self, _: object, context: Context) -> pb.Receipt:
        async with answering(context):
            client = await authenticate(context, self._store)
            mine = Receiving()
            await self._take_place(client.client_id, mine)
            try:
                return await self._upload(client, mine, context)
            finally:
                mine.over.set()
                if self._receiving.get(client.client_id) is mine:
                    del self._receiving[client.client_id]

    async def _take_place(self, client_id: str, mine: Receiving) -> None:
        """An older upload of the client ends; one that is being checked does so with its receipt."""
        older = self._receiving.get(client_id)
        self._receiving[client_id] = mine
        if older is not None:
            older.replaced.set()
            await older.over.wait()

    async def _upload(self, client: Client, mine: Receiving, context: Context) -> pb.Receipt:
        first = await self._read(mine, context)
        if first is None or first.WhichOneof("part") != "header":
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "an upload begins with its header")
        header = first.header
        await self._check_header(header, context)
        phase = await _phase(header.phase, context)
        receipt = await self._receipt(client, header.run_id, header.round, phase, header.payload, context)
        if receipt is not None:
            return receipt
        await self._check_size(header, phase, context)
        await self._begin(client.client_id, header, context)
        self._coordinator.note(client.client_id, "uploading")
        async with self._turnstile.passing(upload=True):
            await self._receive(client.client_id, header, mine, context)
            return await self._accept(client.client_id, header, phase, context)

    async def _check_header(self, header: pb.UploadHeader, context: Context) -> None:
        if len(header.payload) != DIGEST_BYTES:
            await _invalid(context, f"a payload is named by {DIGEST_BYTES} bytes")
        if header.payload_bytes < 1:
            await _invalid(context, "an update has at least one byte")
        if header.offset > header.payload_bytes:
            await refuse(context, grpc.StatusCode.OUT_OF_RANGE, "the offset is beyond the update's end")

    async def _check_size(self, header: pb.UploadHeader, phase: Phase, context: Context) -> None:
        active = self._coordinator.active
        limit = active.upload_limit(phase) if active is not None else 0
        if header.payload_bytes > limit:
            await _invalid(
                context, f"an update of {header.payload_bytes} bytes; the model's has at most {limit}"
            )

    async def _begin(self, client_id: str, header: pb.UploadHeader, context: Context) -> None:
        stored = await asyncio.to_thread(self._uploads.stored, client_id, header.payload)
        if header.offset > stored:
            await refuse(
                context,
                grpc.StatusCode.OUT_OF_RANGE,
                f"offset {header.offset} is beyond the {stored} bytes stored: ask GetUpload",
            )
        await asyncio.to_thread(self._uploads.begin, client_id, header.payload, header.offset)

    async def _receive(
        self, client_id: str, header: pb.UploadHeader, mine: Receiving, context: Context
    ) -> None:
        """The bytes from the offset to the end, into the client's file."""
        at = header.offset
        while (request := await self._read(mine, context)) is not None:
            if request.WhichOneof("part") != "data":
                await _invalid(context, "after its header an upload has nothing but data")
            if at + len(request.data) > header.payload_bytes:
                await asyncio.to_thread(self._uploads.drop, client_id, header.payload)
                await _invalid(context, f"more than the {header.payload_bytes} bytes that were announced")
            await asyncio.to_thread(self._uploads.write, client_id, header.payload, at, request.data)
            at += len(request.data)
        if at < header.payload_bytes:
            await _invalid(context, f"the upload ended at byte {at} of {header.payload_bytes}")

    async def _read(self, mine: Receiving, context: Context) -> pb.UploadRequest | None:
        """The next message; None at the end. Being replaced ends the call, read or not."""
        reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
        replaced = asyncio.ensure_future(mine.replaced.wait())
        try:
            await asyncio.wait({reading, replaced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            replaced.cancel()
            reading.cancel()
            reading.add_done_callback(_forget)
        if mine.replaced.is_set():
            await refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, "a newer upload of this client took its place"
            )
        request = reading.result()
        return request if isinstance(request, pb.UploadRequest) else None

    async def _accept(
        self, client_id: str, header: pb.UploadHeader, phase: Phase, context: Context
    ) -> pb.Receipt:
        path: Path = self._uploads.path(client_id, header.payload)
        address = client_id, header.run_id, header.round, phase
        try:
            receipt_id = await self._coordinator.accept(*address, header.payload, path)
        except UpdateRefused as error:
            await asyncio.to_thread(self._uploads.drop, client_id, header.payload)
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Rejected as error:
            await asyncio.to_thread(self._uploads.drop, client_id, header.payload)
            await _invalid(context, f"the update was rejected: {error}")
        except DamagedUpload as error:
            await asyncio.to_thread(self._uploads.drop, client_id, header.payload)
            if header.offset > 0:
                # What was stored of it before a power cut may be at fault, and not its sender.
                await refuse(context, grpc.StatusCode.UNAVAILABLE, f"{error}: send it again from the start")
            await self._coordinator.reject(*address, str(error))
            await _invalid(context, f"the update was rejected: {error}")
        return _receipt(header.run_id, header.round, phase, header.payload, receipt_id)


def _receipt(run_id: str, number: int, phase: Phase, payload: bytes, receipt_id: str) -> pb.Receipt:
    return pb.Receipt(
        run_id=run_id, round=number, payload=payload, receipt_id=receipt_id, phase=phase_to_message(phase)
    )


async def _phase(number: int, context: Context) -> Phase:
    try:
        return phase_from_message(number)
    except WireError as error:
        await _invalid(context, str(error))


def _forget(reading: asyncio.Future[Any]) -> None:
    """A read that broke after its call was over has nobody to tell."""
    if not reading.cancelled():
        reading.exception()


async def _invalid(context: Context, message: str) -> NoReturn:
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)


async def _check_budget(context: Context, budget: float) -> None:
    if not (math.isfinite(budget) and 1 <= budget <= MAX_BITS):
        await _invalid(context, f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}")


def _not_selected(seat: Seat | None, number: int) -> str:
    if seat is None:
        return f"this client is not in round {number}"
    if seat.state == "updated":
        return f"round {number} has another update of this client"
    return f"round {number} went on without this client: {seat.reason}"


def _words(text: str) -> str:
    """For the operator's table: printable, and not too long."""
    return "".join(c for c in text[:_MAX_WORDS] if c.isprintable() and c.isascii())
