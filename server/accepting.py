"""Answers on their way into an open round: checked a few at a time, made durable together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedmpq.exchange.wire import digest
from fedmpq.server.batched import Batched
from fedmpq.server.resources import Resources
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import Answered, Seat
from fedmpq.server.validation import Rejected

if TYPE_CHECKING:
    from fedmpq.server.round_in_progress import RoundInProgress

SMALL_BYTES = 256 << 10
"""Answers of up to this many bytes are made durable together."""


@dataclass(frozen=True)
class Checked:
    """An answer that is good."""

    size: int
    data: bytes | None
    """None: it is durable already."""


class DamagedUpload(RuntimeError):
    """The bytes that arrived have another hash than announced, perhaps for a fault of the server's disk."""


class Accepting:
    """What comes for one round. A receipt is given when its own answer is durable, and not before: the blob
    and its name on the disk, then the fact that refers to it in the store."""

    def __init__(self, current: RoundInProgress, resources: Resources) -> None:
        self._round = current
        self._resources = resources
        self._puts: Batched[bytes, bytes] = Batched(self._put_all)
        self._answers: Batched[Answered, str] = Batched(current.add_answers)
        self._preparing: asyncio.Future[None] | None = None

    def prepare(self) -> None:
        """A client has its work: until answers come there is time to make what checks of them need."""
        if self._preparing is None:
            work, seats = self._round.work, self._round.stored.seats
            self._preparing = asyncio.ensure_future(self._resources.workers.check(work.prepare_checks, seats))
            # What is wrong there is so when an answer is checked.
            self._preparing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def accept(self, client_id: str, seat: Seat, name: bytes, upload: Path | bytes) -> str:
        """Check an answer that has arrived whole, in a file or in memory, and make it durable; its receipt.

        Raises Rejected, UpdateRefused or DamagedUpload. Answers that come together are made durable together.
        """
        claimed = await self._claimed_samples(client_id)
        # While it is checked. What comes to be of no use is swept with the round, never deleted here: of an
        # answer that somebody has copied there is one blob.
        putting = None
        if isinstance(upload, bytes) and digest(upload) == name:
            putting = asyncio.ensure_future(self._puts.ask(upload))
        try:
            checked = await self._resources.workers.check(self._check_and_keep, seat, claimed, name, upload)
        except Rejected as rejected:
            await self._round.reject(seat, str(rejected))
            raise
        finally:
            if putting is not None:
                await asyncio.wait({putting})
                putting.exception()  # or asyncio would complain that nobody looked
        if putting is not None:
            putting.result()
        elif checked.data is not None:
            await self._puts.ask(checked.data)
        try:
            receipt_id = await self._answers.ask(Answered(seat.client, name, checked.size, seat.payload))
        except UpdateRefused:
            await asyncio.to_thread(self._resources.blobs.delete, name)
            raise
        self._resources.connections.changed.ring()
        return receipt_id

    async def _put_all(self, items: Sequence[bytes]) -> list[bytes]:
        return await asyncio.to_thread(self._resources.put_answers, items)

    async def _claimed_samples(self, client_id: str) -> int:
        """What the client said last of its samples, which it trains on; what it was selected with counts."""
        counted = self._round.active.members[client_id].record.samples
        if (connection := self._resources.connections.get(client_id)) is not None:
            return max(counted, connection.client.samples)
        client = await asyncio.to_thread(self._resources.store.client_by_id, client_id)
        return counted if client is None else max(counted, client.samples)

    def _check_and_keep(self, seat: Seat, max_samples: int, name: bytes, upload: Path | bytes) -> Checked:
        """An answer that is good; a large one is durable as a blob now, for memory holds few of them.

        A file is read once: the bytes that were hashed and checked are those that are stored.
        """
        try:
            data = upload if isinstance(upload, bytes) else upload.read_bytes()
        except FileNotFoundError:
            raise UpdateRefused(f"round {self._round.address.number} went on without this client") from None
        if digest(data) != name:
            raise DamagedUpload("the bytes that arrived have another hash than the header says")
        self._round.work.check(name, data, seat, max_samples)
        if len(data) <= SMALL_BYTES:
            return Checked(len(data), data)
        self._resources.put_answers([data])
        return Checked(len(data), None)
