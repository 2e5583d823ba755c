"""Uploads of updates and calibrations: from a call's first message to the receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from fedmpq.exchange.wire import DIGEST_BYTES, WireError, phase_from_message, phase_to_message
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.accepting import DamagedUpload
from fedmpq.server.at_work import AtWork
from fedmpq.server.incoming import Incoming, Memory
from fedmpq.server.refusals import Context, refuse, refuse_argument
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import ENDED, Client, RoundAddress, Seat
from fedmpq.server.transfer_queue import Transfer, TransferQueue
from fedmpq.server.validation import Rejected

T = TypeVar("T")
_MAX_RUN_ID = 100


@dataclass
class Receiving:
    """An upload under way; a newer one of the same client takes its place."""

    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: Incoming | None = None
    """What has arrived of it; None: it has not begun."""


class UploadCalls:
    """The uploads of all clients; each client has one at a time.

    From its last byte until it has its receipt or is refused an upload is the server's alone, whether or not
    its sender still waits: the next call of the same client waits for that. So no call touches a file that
    is being read, and an honest client that was cut off meanwhile gets its receipt.
    """

    def __init__(self, at_work: AtWork, transfers: TransferQueue) -> None:
        self._at_work = at_work
        self._store = at_work.store
        self._uploads = at_work.uploads
        self._transfers = transfers
        self._memory = Memory()
        self._receiving: dict[str, Receiving] = {}
        self._checking: dict[str, asyncio.Future[str]] = {}
        """By client: gives the receipt of the upload that has arrived whole."""

    async def status(self, client: Client, request: pb.GetUploadRequest, context: Context) -> pb.UploadStatus:
        """How much of an upload has arrived, or its receipt."""
        await _check_name(request.payload, context)
        address = await _address(request, context)
        await self._checked(client.client_id)
        receipt = await self._receipt(client, address, request.payload, context)
        if receipt is not None:
            return pb.UploadStatus(receipt=receipt)
        receiving = self._receiving.get(client.client_id)
        if receiving is not None and receiving.incoming is not None:
            await receiving.incoming.keep_what_can_be()
        stored = await asyncio.to_thread(self._uploads.stored, client.client_id, request.payload)
        return pb.UploadStatus(offset=stored)

    async def receive(self, client: Client, context: Context) -> pb.Receipt:
        """One upload from its header to its end."""
        mine = Receiving()
        older = self._receiving.get(client.client_id)
        self._receiving[client.client_id] = mine
        try:
            if older is not None:
                older.replaced.set()
                await older.over.wait()
            await self._checked(client.client_id)
            return await self._upload(client, mine, context)
        finally:
            mine.over.set()
            if self._receiving.get(client.client_id) is mine:
                del self._receiving[client.client_id]

    async def _checked(self, client_id: str) -> None:
        """When nothing of the client's is being checked."""
        while (checking := self._checking.get(client_id)) is not None:
            await asyncio.wait({checking})

    async def _receipt(
        self, client: Client, address: RoundAddress, payload: bytes, context: Context
    ) -> pb.Receipt | None:
        """The receipt of an answer the server has; None if the client may send it; else it is refused."""
        seat = self._at_work.place(client.client_id, address)
        if seat is not None and seat.state == "selected":
            return None
        if _is_plausible(address):
            seat = await asyncio.to_thread(self._store.seat_of, address, client.client_id)
        if seat is not None and seat.answer is not None and seat.answer.payload == payload:
            return _receipt(address, payload, seat.answer.receipt_id)
        if seat is not None and seat.state == "rejected":
            await refuse_argument(context, f"this client's update was rejected: {seat.reason}")
        if seat is None or seat.state != "selected":
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, _not_selected(seat, address.number))
        if self._at_work.place(client.client_id, address) is None:
            run = await asyncio.to_thread(self._store.run, address.run_id)
            if run.state in ENDED:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"the run is {run.state}")
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "the run is being read from the store: retry")
        return None

    async def _upload(self, client: Client, mine: Receiving, context: Context) -> pb.Receipt:
        first = await _read(mine, context)
        if first is None or first.WhichOneof("part") != "header":
            await refuse_argument(context, "an upload begins with its header")
        header = first.header
        await _check_header(header, context)
        address = await _address(header, context)
        receipt = await self._receipt(client, address, header.payload, context)
        if receipt is not None:
            return receipt
        await self._check_size(header, address, context)
        incoming = mine.incoming = await self._begin(client.client_id, header, context)
        self._at_work.note_upload(client.client_id)
        try:
            async with self._transfers.transfer(client.client_id, upload=True) as transfer:
                await self._receive(header, incoming, mine, transfer, context)
        except BaseException:
            if self._at_work.place(client.client_id, address) is not None:
                await incoming.keep_what_can_be()
            else:
                await incoming.drop()
            raise
        return await self._accept(client.client_id, header, address, incoming, context)

    async def _check_size(self, header: pb.UploadHeader, address: RoundAddress, context: Context) -> None:
        active = self._at_work.active
        limit = active.upload_limit(address.phase) if active is not None else 0
        if header.payload_bytes > limit:
            await refuse_argument(
                context, f"an update of {header.payload_bytes} bytes; the model's has at most {limit}"
            )

    async def _begin(self, client_id: str, header: pb.UploadHeader, context: Context) -> Incoming:
        incoming = Incoming(self._uploads, self._memory, client_id, header.payload, header.offset)
        if header.offset == 0 and not self._uploads.may_have(client_id):
            return incoming
        stored = await asyncio.to_thread(self._uploads.stored, client_id, header.payload)
        if header.offset > stored:
            await refuse(
                context,
                grpc.StatusCode.OUT_OF_RANGE,
                f"offset {header.offset} is beyond the {stored} bytes stored: ask GetUpload",
            )
        await incoming.begin()
        return incoming

    async def _receive(
        self,
        header: pb.UploadHeader,
        incoming: Incoming,
        mine: Receiving,
        transfer: Transfer,
        context: Context,
    ) -> None:
        """The bytes from the offset to the end."""
        await _unless_replaced(mine, transfer.work(), context)
        while True:
            with transfer.waiting():
                request = await _read(mine, context)
            if request is None:
                break
            if not transfer.has_slot:
                await _unless_replaced(mine, transfer.work(), context)
            if request.WhichOneof("part") != "data":
                await refuse_argument(context, "after its header an upload has nothing but data")
            if incoming.at + len(request.data) > header.payload_bytes:
                await incoming.drop()
                await refuse_argument(
                    context, f"more than the {header.payload_bytes} bytes that were announced"
                )
            try:
                await incoming.add(request.data)
            except FileNotFoundError:
                message = "what had arrived of this upload was removed: ask GetUpload"
                await refuse(context, grpc.StatusCode.UNAVAILABLE, message)
            transfer.moved(len(request.data))
        if incoming.at < header.payload_bytes:
            words = f"the upload ended at byte {incoming.at} of {header.payload_bytes}"
            await refuse_argument(context, words)

    async def _accept(
        self,
        client_id: str,
        header: pb.UploadHeader,
        address: RoundAddress,
        incoming: Incoming,
        context: Context,
    ) -> pb.Receipt:
        check = self._check(client_id, header, address, incoming)
        checking = self._checking[client_id] = asyncio.ensure_future(check)
        checking.add_done_callback(lambda done: self._forget_check(client_id, done))
        try:
            receipt_id = await asyncio.shield(checking)
        except UpdateRefused as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except DamagedUpload as error:
            if header.offset > 0:
                await refuse(context, grpc.StatusCode.UNAVAILABLE, f"{error}: send it again from the start")
            await refuse_argument(context, f"the update was rejected: {error}")
        except Rejected as error:
            await refuse_argument(context, f"the update was rejected: {error}")
        return _receipt(address, header.payload, receipt_id)

    async def _check(
        self, client_id: str, header: pb.UploadHeader, address: RoundAddress, incoming: Incoming
    ) -> str:
        """The receipt; raises what is wrong with the upload. A disk that fails leaves it for the next try."""
        try:
            upload = await incoming.whole()
            receipt_id = await self._at_work.accept(client_id, address, header.payload, upload)
        except OSError:
            await incoming.keep_what_can_be()
            raise
        except (UpdateRefused, Rejected, DamagedUpload) as error:
            await incoming.drop()
            # What was stored of it before a power cut may be at fault, and not its sender.
            if isinstance(error, DamagedUpload) and header.offset == 0:
                await self._at_work.reject(client_id, address, str(error))
            raise
        finally:
            incoming.release()
        await incoming.drop()
        return receipt_id

    def _forget_check(self, client_id: str, done: asyncio.Future[str]) -> None:
        del self._checking[client_id]
        _forget(done)


async def _address(said: pb.GetUploadRequest | pb.UploadHeader, context: Context) -> RoundAddress:
    try:
        return RoundAddress(said.run_id, said.round, phase_from_message(said.phase))
    except WireError as error:
        await refuse_argument(context, str(error))


def _is_plausible(address: RoundAddress) -> bool:
    """Whether there can be such a round; what cannot be need not trouble the database."""
    run_id = address.run_id
    return len(run_id) <= _MAX_RUN_ID and "\0" not in run_id and 1 <= address.number < 1 << 31


async def _check_header(header: pb.UploadHeader, context: Context) -> None:
    await _check_name(header.payload, context)
    if header.payload_bytes < 1:
        await refuse_argument(context, "an update has at least one byte")
    if header.offset > header.payload_bytes:
        await refuse(context, grpc.StatusCode.OUT_OF_RANGE, "the offset is beyond the update's end")


async def _check_name(name: bytes, context: Context) -> None:
    if len(name) != DIGEST_BYTES:
        await refuse_argument(context, f"a payload is named by {DIGEST_BYTES} bytes")


async def _read(mine: Receiving, context: Context) -> pb.UploadRequest | None:
    """The next message; None at the end."""
    request = await _unless_replaced(mine, context.read(), context)
    return request if isinstance(request, pb.UploadRequest) else None


async def _unless_replaced(mine: Receiving, awaited: Awaitable[T], context: Context) -> T:
    """What is awaited; being replaced ends the call, whether or not that has come."""
    wanted = asyncio.ensure_future(awaited)
    replaced = asyncio.ensure_future(mine.replaced.wait())
    either: set[asyncio.Future[Any]] = {wanted, replaced}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        replaced.cancel()
        wanted.cancel()
        wanted.add_done_callback(_forget)
    if mine.replaced.is_set():
        await refuse(
            context, grpc.StatusCode.RESOURCE_EXHAUSTED, "a newer upload of this client took its place"
        )
    return wanted.result()


def _forget(broken: asyncio.Future[Any]) -> None:
    """What broke after its call was over has nobody to tell."""
    if not broken.cancelled():
        broken.exception()


def _receipt(address: RoundAddress, payload: bytes, receipt_id: str) -> pb.Receipt:
    return pb.Receipt(
        run_id=address.run_id,
        round=address.number,
        payload=payload,
        receipt_id=receipt_id,
        phase=phase_to_message(address.phase),
    )


def _not_selected(seat: Seat | None, number: int) -> str:
    if seat is None:
        return f"this client is not in round {number}"
    if seat.state == "updated":
        return f"round {number} has another update of this client"
    return f"round {number} went on without this client: {seat.reason}"
