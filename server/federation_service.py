"""The Federation service: what boards call. Each method checks who calls and what it says, then has the
coordinator, or what a front-end knows of its work, act on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from typing import NoReturn

import grpc
import grpc.aio

from fedmpq.data.dataset import DataError
from fedmpq.data.value_range import ValueRange
from fedmpq.exchange.wire import DIGEST_BYTES, WireError, phase_from_message
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.server.at_work import AtWork
from fedmpq.server.authentication import Authentication, certificate_ends
from fedmpq.server.batched import Batched
from fedmpq.server.connections import Closing, TooManyConnections
from fedmpq.server.enrolment_calls import EnrolmentCalls, budget_fault
from fedmpq.server.model_calls import ModelCalls
from fedmpq.server.rate_limit import address_of
from fedmpq.server.refusals import Context, answering, refuse, refuse_argument
from fedmpq.server.store.records import Client, Described, RoundAddress
from fedmpq.server.transfer_queue import Transfer, TransferQueue
from fedmpq.server.upload_calls import UploadCalls
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

CHUNK_BYTES = 16 << 10
"""A message that broke off half-way is lost whole, so this is how much a cut can cost."""
LEAST_CHUNK_BYTES = 1 << 10
"""A client whose connections break often may ask for chunks as short as this."""
MAX_DOWNLOADS = 4
"""By one client at a time: some may be left over from connections that broke unnoticed."""
TRANSFERS_AT_ONCE = 8
MAX_SAMPLES = 1 << 40
_MAX_WORDS = 100
MAX_REASON = 300
_CLOSINGS: dict[Closing, tuple[grpc.StatusCode, str]] = {
    "replaced": (grpc.StatusCode.RESOURCE_EXHAUSTED, "a newer stream of this client took its place"),
    "revoked": (grpc.StatusCode.UNAUTHENTICATED, "this client was revoked: enrol again with a valid token"),
    "unread": (grpc.StatusCode.RESOURCE_EXHAUSTED, "this client does not read its events"),
    "gone": (grpc.StatusCode.CANCELLED, "the client went away"),
    "stopping": (grpc.StatusCode.UNAVAILABLE, "the server is stopping: retry with back-off"),
}


class FederationService(federation_pb2_grpc.FederationServicer):
    def __init__(self, at_work: AtWork) -> None:
        self._at_work = at_work
        self._store = at_work.store
        self._authentication = Authentication(at_work.store)
        self._descriptions: Batched[Described, Client] = Batched(self._describe_all)
        self._enrolment = EnrolmentCalls(at_work.store)
        self._downloads: Counter[str] = Counter()
        self._transfers = TransferQueue(TRANSFERS_AT_ONCE)
        self._models = ModelCalls(at_work)
        self._uploads = UploadCalls(at_work, self._transfers)
        self._welcome = pb.Event(
            welcome=pb.Welcome(server_version=version("fedmpq"), chunk_bytes=CHUNK_BYTES)
        )

    # Enroll

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollResponse:
        async with answering(context):
            return await self._enrolment.enrol(request, _words(request.version), context)

    # Listen

    async def Listen(self, request: pb.ListenRequest, context: Context) -> AsyncIterator[pb.Event]:
        async with answering(context):
            client = await self._described(await self._authentication.client(context), request, context)
            bounds = await _bounds(request, context)
            try:
                connection = self._at_work.connections.connect(client, request.answers)
            except TooManyConnections as error:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}: retry later")
            connection.bounds, connection.confirms = bounds, request.confirms
            if (ends := certificate_ends(context)) is not None:
                self._at_work.connections.certificate_ends[client.client_id] = ends
            if request.free_bytes:
                self._at_work.connections.free_bytes[client.client_id] = request.free_bytes
            say(log, "client connected", client=client.name, address=address_of(context.peer()))
            try:
                connection.send(self._welcome)
                self._at_work.greet(connection)
                while not isinstance(event := await connection.next(), str):
                    yield event
            finally:
                self._at_work.connections.disconnect(connection)
                say(log, "client disconnected", client=client.name, reason=connection.closed)
            await refuse(context, *_CLOSINGS[event])

    async def _described(self, client: Client, request: pb.ListenRequest, context: Context) -> Client:
        """The client with what it says of itself now."""
        if (fault := budget_fault(request.budget)) is not None:
            await refuse_argument(context, fault)
        await _check_samples(request.samples, context)
        said = (request.budget, request.samples, _words(request.version), _words(request.engine))
        return await self._descriptions.ask(Described(client.client_id, *said))

    async def _describe_all(self, described: Sequence[Described]) -> list[Client]:
        return await asyncio.to_thread(self._store.describe_clients, described, time.time())

    # Download

    async def Download(self, request: pb.DownloadRequest, context: Context) -> AsyncIterator[pb.Chunk]:
        async with answering(context):
            client = await self._authentication.client(context)
            if len(request.payload) != DIGEST_BYTES:
                await refuse_argument(context, f"a payload is named by {DIGEST_BYTES} bytes")
            if self._downloads[client.client_id] >= MAX_DOWNLOADS:
                await refuse(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MAX_DOWNLOADS} downloads of this client are open, the most it may have: retry later",
                )
            self._downloads[client.client_id] += 1
            try:
                with self._at_work.outgoing.reading(request.payload):
                    async with self._transfers.transfer(client.client_id, upload=False) as transfer:
                        async for data in self._pieces(request, transfer, context):
                            with transfer.waiting():
                                yield pb.Chunk(data=data)
                            transfer.moved(len(data))
                self._at_work.note_download(client.client_id)
            finally:
                self._downloads[client.client_id] -= 1
                self._downloads += Counter()

    async def _pieces(
        self, request: pb.DownloadRequest, transfer: Transfer, context: Context
    ) -> AsyncIterator[bytes]:
        """The payload from the offset on, each piece when it is the transfer's turn."""
        await transfer.work()
        # Held until the download is over: a round that ends meanwhile does not cut it off.
        whole = self._in_memory(request.payload)
        at, size = request.offset, await self._size(request, whole, context)
        count = max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, request.chunk_bytes or CHUNK_BYTES))
        while at < size:
            await transfer.work()
            if whole is not None:
                data = whole[at : at + count]
            else:
                data = await self._piece(request.payload, at, count, context)
            yield data
            at += len(data)

    def _in_memory(self, name: bytes) -> bytes | None:
        active = self._at_work.active
        if active is not None and name == active.run.graph:
            return active.graph_bytes
        return self._at_work.outgoing.held(name)

    async def _size(self, request: pb.DownloadRequest, whole: bytes | None, context: Context) -> int:
        if whole is not None:
            size = len(whole)
        else:
            found = await self._at_work.payload_size(request.payload)
            size = found if found is not None else await self._no_payload(context)
        if request.offset > size:
            message = f"offset {request.offset} is beyond the payload's {size} bytes"
            await refuse(context, grpc.StatusCode.OUT_OF_RANGE, message)
        return size

    async def _piece(self, name: bytes, at: int, count: int, context: Context) -> bytes:
        """The file is opened for every piece: a call may be cancelled at any moment, and leaves none open."""
        data = await asyncio.to_thread(self._at_work.outgoing.read, name, at, count)
        return data or await self._no_payload(context)

    async def _no_payload(self, context: Context) -> NoReturn:
        if self._at_work.loading:
            message = "the run is being read from the store: retry"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, message)
        message = "no such payload: the round it belongs to may be over"
        await refuse(context, grpc.StatusCode.NOT_FOUND, message)

    # The client's own model

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.ModelOffer:
        async with answering(context):
            client = await self._authentication.client(context)
            return await self._models.offer(client, request.format, context)

    async def ReportModel(self, request: pb.ReportModelRequest, context: Context) -> pb.ReportModelResponse:
        async with answering(context):
            client = await self._authentication.client(context)
            await self._models.report(client, request, _words(request.reason, MAX_REASON), context)
            return pb.ReportModelResponse()

    # Ready, Confirm and Decline

    async def Ready(self, request: pb.ReadyRequest, context: Context) -> pb.ReadyResponse:
        async with answering(context):
            client = await self._authentication.client(context)
            await _check_samples(request.samples, context)
            said = client.budget, request.samples, client.version, client.engine
            client = await self._descriptions.ask(Described(client.client_id, *said))
            await self._at_work.ready(client, request.run_id)
            return pb.ReadyResponse()

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        async with answering(context):
            client = await self._authentication.client(context)
            await self._at_work.confirmed(client.client_id, request.run_id)
            return pb.ConfirmResponse()

    async def Decline(self, request: pb.DeclineRequest, context: Context) -> pb.DeclineResponse:
        async with answering(context):
            client = await self._authentication.client(context)
            reason = _words(request.reason, MAX_REASON) or "it did not say why"
            try:
                address = RoundAddress(request.run_id, request.round, phase_from_message(request.phase))
            except WireError as error:
                await refuse_argument(context, str(error))
            await self._at_work.decline(client.client_id, address if request.run_id else None, reason)
            return pb.DeclineResponse()

    # Upload

    async def GetUpload(self, request: pb.GetUploadRequest, context: Context) -> pb.UploadStatus:
        async with answering(context):
            client = await self._authentication.client(context)
            return await self._uploads.status(client, request, context)

    async def Upload(self, _: object, context: Context) -> pb.Receipt:
        async with answering(context):
            client = await self._authentication.client(context)
            return await self._uploads.receive(client, context)


async def _bounds(request: pb.ListenRequest, context: Context) -> ValueRange | None:
    """The range of the client's measured values, if it has some."""
    if not request.low and not request.high:
        return None
    try:
        return ValueRange(tuple(request.low), tuple(request.high))
    except DataError as error:
        await refuse_argument(context, f"the bounds of this client's values: {error}")


async def _check_samples(samples: int, context: Context) -> None:
    if not MIN_SAMPLES <= samples <= MAX_SAMPLES:
        await refuse_argument(context, f"a client trains on {MIN_SAMPLES} samples or more, not on {samples}")


def _words(text: str, most: int = _MAX_WORDS) -> str:
    """For the operator's table: printable, and not too long."""
    return "".join(c for c in text[:most] if c.isprintable() and c.isascii())
