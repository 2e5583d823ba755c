"""Which boards are at which front-end: written by each front-end of its own, read by the leader.

The leader's `Connections` are then a copy of what all front-ends have, a fraction of a second old. A
front-end that does not say that it is there for the length of a lease is gone, and its boards are away; they
connect to another one meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedmpq.data.value_range import ValueRange
from fedmpq.server.connections import Connection, Connections
from fedmpq.server.pace import Pace
from fedmpq.server.readiness import mark_declined, mark_ready
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Client, FrontEnd, Present
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

LOOK_SECONDS = 1.0
"""From one look for what boards said to other front-ends to the next."""
BEATS = 3
"""In the length of a lease."""
FORGET_SECONDS = 600.0
"""A front-end that has been gone for so long is removed from the store."""
Said = tuple[Any, ...]


class PresenceWriter:
    """The boards of one front-end, as it tells the leader of them."""

    def __init__(
        self, store: Store, connections: Connections, front_id: str, address: str, seconds: float
    ) -> None:
        self._store = store
        self._connections = connections
        self._front_id = front_id
        self._address = address
        self._seconds = seconds
        self._noted: dict[str, Said] = {}

    async def keep(self, tell: Callable[[], None]) -> None:
        """Until it is cancelled: whatever changes is stored, and then told."""
        pace, beaten, heard = Pace(share=1.0), -self._seconds, 0.0
        while True:
            seen = self._connections.changed.count
            pace.begin()
            try:
                if time.monotonic() - beaten >= self._seconds / BEATS:
                    await self._beat()
                    beaten = time.monotonic()
                if time.monotonic() - heard >= LOOK_SECONDS:
                    await self.hear()
                    heard = time.monotonic()
                await self.note()
                tell()
            except StoreFailed:
                # The store has told the log.
                pass
            pace.end()
            await self._connections.changed.wait(seen, min(LOOK_SECONDS, self._seconds / BEATS / 2))
            await pace.rest()

    async def _beat(self) -> None:
        if await asyncio.to_thread(self._store.beat, self._front_id, self._address, self._seconds):
            self._noted.clear()
        theirs = await asyncio.to_thread(self._store.boards_at, self._front_id)
        for client_id in self._noted.keys() - theirs:
            # Another front-end has a newer stream of it.
            if (connection := self._connections.get(client_id)) is not None:
                connection.close("replaced")

    async def note(self) -> None:
        """What is new since the last time."""
        now = {each.client.client_id: _said(self._connections, each) for each in self._connections.open()}
        come: list[Present] = []
        changed: list[Present] = []
        for client_id, said in now.items():
            if (noted := self._noted.get(client_id)) == said:
                continue
            one = Present(client_id, True, dict(zip(NAMES, said, strict=True)))
            (changed if noted is not None and noted[0] == said[0] else come).append(one)
        gone = self._noted.keys() - now.keys()
        if come or changed or gone:
            await asyncio.to_thread(self._store.note_presence, self._front_id, come, changed, gone)
        self._noted = now

    async def hear(self) -> None:
        """What boards that are here have said to other front-ends."""
        for one in await asyncio.to_thread(self._store.take_forwarded, self._front_id):
            await self._hear(one.client_id, one.ready_for, one.declined)

    async def _hear(self, client_id: str, ready_for: str | None, declined: str) -> None:
        if ready_for is None:
            mark_declined(self._connections, client_id, declined)
            return
        client = await asyncio.to_thread(self._store.client_by_id, client_id)
        if client is not None:
            mark_ready(self._connections, client, ready_for)

    async def end(self) -> None:
        """The front-end stops in order: its boards are away at once."""
        # A store that fails has told the log, and the heartbeat ends by itself.
        with contextlib.suppress(StoreFailed):
            await asyncio.to_thread(self._store.remove_front, self._front_id)


NAMES = (
    "stream",
    "answers",
    "ready_for",
    "declined",
    "described",
    "bounds",
    "certificate_ends",
    "free_bytes",
    "samples",
    "budget",
)


def _said(connections: Connections, connection: Connection) -> Said:
    client, bounds = connection.client, connection.bounds
    return (
        connection.since,
        connection.answers,
        connection.ready_for,
        connection.declined,
        connection.described,
        None if bounds is None else [list(bounds.low), list(bounds.high)],
        connections.certificate_ends.get(client.client_id),
        connections.free_bytes.get(client.client_id),
        # The leader reads these in the clients' table; here they say that it is to read them again.
        client.samples,
        client.budget,
    )


class PresenceReader:
    """The boards of all front-ends, as the leader knows of them."""

    def __init__(self, store: Store, connections: Connections) -> None:
        self._store = store
        self._connections = connections
        self._seen: dict[str, int] = {}
        """Versions of the front-ends that are there."""
        self._at: dict[str, tuple[str, float]] = {}
        """By client, its front-end and stream."""

    async def look(self) -> None:
        """What has changed since the last look."""
        known = await asyncio.to_thread(self._store.front_ends)
        there = {front.front_id: front for front in known if front.left > 0}
        for front in known:
            if front.left < -FORGET_SECONDS:
                await asyncio.to_thread(self._store.remove_front, front.front_id)
        for front_id in self._seen.keys() - there.keys():
            self._lose(front_id)
        for front in there.values():
            if front.front_id not in self._seen:
                say(log, "front-end is there", address=front.address, front=front.front_id)
            if front.version != self._seen.get(front.front_id):
                await self._read(front)

    async def _read(self, front: FrontEnd) -> None:
        since = self._seen.get(front.front_id, 0)
        rows = await asyncio.to_thread(self._store.presence, front.front_id, since)
        ids = {row.client_id for row in rows if row.here}
        clients = await asyncio.to_thread(self._store.clients_by_id, ids) if ids else {}
        for row in rows:
            if row.here and row.client_id in clients:
                self._take(front.front_id, clients[row.client_id], row.said)
            elif not row.here:
                # A board has one row, of the front-end that had it last: wherever it was known, it is gone.
                self._leave(row.client_id)
        self._seen[front.front_id] = front.version
        self._connections.changed.ring()

    def _take(self, front_id: str, client: Client, said: Mapping[str, Any]) -> None:
        at, connection = (front_id, said["stream"]), self._connections.get(client.client_id)
        if connection is None or self._at.get(client.client_id) != at:
            connection = self._connections.connect(client, said["answers"])
            self._at[client.client_id] = at
        connection.client = client
        connection.ready_for, connection.declined = said["ready_for"], said["declined"]
        connection.described = said["described"]
        bounds = said["bounds"]
        connection.bounds = None if bounds is None else ValueRange(tuple(bounds[0]), tuple(bounds[1]))
        shown = (self._connections.certificate_ends, said["certificate_ends"])
        free = (self._connections.free_bytes, said["free_bytes"])
        for kept, value in (shown, free):
            if value is not None:
                kept[client.client_id] = value

    def _leave(self, client_id: str) -> None:
        self._at.pop(client_id, None)
        if (connection := self._connections.get(client_id)) is not None:
            self._connections.disconnect(connection)

    def _lose(self, front_id: str) -> None:
        boards = [client_id for client_id, at in self._at.items() if at[0] == front_id]
        say(log, "front-end is gone", level=logging.WARNING, front=front_id, boards=len(boards))
        for client_id in boards:
            self._leave(client_id)
        del self._seen[front_id]
        self._connections.changed.ring()
