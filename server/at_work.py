"""The run at work and its open round, as boards' calls meet them.

The coordinator conducts them; a front-end follows what the store says of them. Boards cannot tell the two
apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fedmpq.server.active_run import ActiveRun
from fedmpq.server.agreed_range import is_open
from fedmpq.server.blobs import Uploads
from fedmpq.server.connections import Connection
from fedmpq.server.exports import Exports
from fedmpq.server.farewells import Farewells
from fedmpq.server.readiness import describe, mark_declined, mark_ready
from fedmpq.server.resources import Resources
from fedmpq.server.rollouts import Rollouts
from fedmpq.server.round_events import run_ended
from fedmpq.server.round_in_progress import RoundInProgress
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.records import Client, RoundAddress, Run, Seat

T = TypeVar("T")


class AtWork:
    """What the services ask for."""

    def __init__(self, resources: Resources, exports: Exports, uploads: Uploads) -> None:
        self._resources = resources
        self.store, self.blobs = resources.store, resources.blobs
        self.outgoing, self.connections = resources.outgoing, resources.connections
        self.clock = resources.clock
        self.exports = exports
        self.uploads = uploads
        self.rollouts = Rollouts(resources.store, exports, resources.clock)
        self.active: ActiveRun | None = None
        """The run at work; None: there is none."""
        self.round: RoundInProgress | None = None
        """Its open round; None: the next one is not open yet."""
        self.loading = True
        """Whether the run at work is still being read from the store: what it has is then not all known."""
        self._farewells = Farewells(resources.connections)
        self._uninterrupted: set[asyncio.Task[Any]] = set()

    def greet(self, connection: Connection) -> None:
        """What a client that has just connected must know: its unfinished work, or that the run is over."""
        if self.active is not None and connection.answers and not is_open(self.active):
            describe(connection, self.active)
        if self.round is not None:
            self.round.greet(connection)
        elif self.active is None:
            self._farewells.tell(connection)

    async def farewell(self, seconds: float) -> None:
        """Until every client of the last run knows that it is over, or so many seconds passed in vain."""
        await self._farewells.all_told(seconds)

    async def confirmed(self, client_id: str, run_id: str) -> None:
        """The client has heard how the run ended."""
        self._farewells.heard(client_id, run_id)

    async def ready(self, client: Client, run_id: str) -> None:
        """The client has its data for the run."""
        mark_ready(self.connections, client, run_id)

    def place(self, client_id: str, address: RoundAddress) -> Seat | None:
        """The client's seat in the open round, if that is the round it speaks of."""
        return None if self.round is None else self.round.place(client_id, address)

    def note_upload(self, client_id: str) -> None:
        """A client has begun to upload, for the operator's eyes."""
        if self.round is not None:
            self.round.note(client_id, "uploading")

    def note_download(self, client_id: str) -> None:
        """A client has downloaded what it works on."""
        if self.round is not None:
            self.round.note(client_id, self.round.work.activity)
            self.round.accepting.prepare()

    async def accept(self, client_id: str, address: RoundAddress, name: bytes, upload: Path | bytes) -> str:
        """Check an update or calibration that has arrived whole and make it durable; its receipt.

        Raises Rejected, UpdateRefused or DamagedUpload. Goes on to its end if the caller goes away.
        """
        current, seat = self.round, self.place(client_id, address)
        if current is None or seat is None:
            raise UpdateRefused(f"round {address.number} is over, or this client is not in it")
        return await self._to_the_end(current.accepting.accept(client_id, seat, name, upload))

    async def reject(self, client_id: str, address: RoundAddress, reason: str) -> None:
        """Count a bad upload against its sender."""
        current, seat = self.round, self.place(client_id, address)
        if current is not None and seat is not None:
            await self._to_the_end(current.reject(seat, reason))

    async def decline(self, client_id: str, address: RoundAddress | None, reason: str) -> None:
        """The client cannot take part in that round, or whichever is open, nor in others on this stream."""
        mark_declined(self.connections, client_id, reason)
        current = self.round
        if current is None:
            return
        if (seat := current.place(client_id, address or current.address)) is not None:
            await self._to_the_end(current.decline(seat, reason))

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """A call that its client cancels half-way must not leave the store ahead of what is known here."""
        task = asyncio.ensure_future(work)
        self._uninterrupted.add(task)
        task.add_done_callback(self._uninterrupted.discard)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """When no update is half-way any more; none can be accepted after this."""
        while self._uninterrupted:
            await asyncio.wait(self._uninterrupted)
        self._resources.workers.shutdown()

    async def _owe_farewells(self) -> Run | None:
        """The run that ended last, whose clients are to hear of it; None: no run has ended.

        A server that was killed may not have told everyone.
        """
        last = await self._resources.persist(self.store.last_ended)
        if last is not None:
            members = await self._resources.persist(self.store.members, last.run_id)
            self._farewells.owe([member.client_id for member in members], run_ended(last))
        return last

    async def payload_size(self, name: bytes) -> int | None:
        """Of a payload that clients may download; one of the open round that is damaged is made again."""
        size = await asyncio.to_thread(self.outgoing.size, name)
        current = self.round
        if size is not None or current is None:
            return size
        if not any(seat.payload == name for seat in current.stored.seats):
            return None
        await self._resources.workers.merge(
            current.work.make_payloads_again, current.stored.seats, self.outgoing
        )
        return await asyncio.to_thread(self.outgoing.size, name)
