"""Who is connected now, and the way to each one's event stream. Lives in the event loop alone.

Nothing here is durable. Whatever a client must know is sent again on its next stream, so a lost event costs
nothing but time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from fedmpq.data.value_range import ValueRange
from fedmpq.proto import federation_pb2
from fedmpq.server.store.records import Client, Sighting

MAX_WAITING_EVENTS = 64
LONG_AWAY_SECONDS = 60.0
Closing = Literal["replaced", "revoked", "unread", "gone", "stopping"]
"""Why a stream ends: a newer one took its place, the client was revoked, does not read its events or went
away, or the server stops."""


class TooManyConnections(RuntimeError):
    """As many clients are connected as the server takes."""


class Bell:
    """Wakes all who wait for a change: each compares the count with the last it saw, so none is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self.count += 1
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, seen: int, seconds: float | None = None) -> None:
        """Until it has rung since the count was `seen`, or so many seconds have passed."""
        if self.count != seen:
            return
        rung = asyncio.ensure_future(self._rung.wait())
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the bell.
            await asyncio.wait({rung}, timeout=seconds)
        finally:
            rung.cancel()


class Connection:
    """One client's open stream: events go in here and come out in the Listen call."""

    def __init__(
        self, client: Client, answers: bool = False, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        """As it described itself when it opened the stream, or was Ready since."""
        self.answers = answers
        """Whether it says that it is ready for a run before it can be chosen."""
        self.ready_for: str | None = None
        """The run that it has said this of."""
        self.confirms = False
        """Whether it says that it has heard how a run ended."""
        self.bounds: ValueRange | None = None
        """The least and greatest of its measured values; None: its samples are codes, or it does not say."""
        self._steady, self._since = steady, steady()
        self.described: str | None = None
        """The run this stream has described to the client."""
        self.declined = ""
        """Why the client cannot take part in rounds; empty: it can."""
        self._events: deque[federation_pb2.Event] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed: Closing | None = None
        """Why the stream ends; None while it is open."""

    @property
    def since(self) -> float:
        """When the stream was opened, by the steady clock."""
        return self._since

    @property
    def age(self) -> float:
        """Seconds since the stream was opened."""
        return self._steady() - self._since

    def send(self, event: federation_pb2.Event) -> None:
        if len(self._events) >= MAX_WAITING_EVENTS:
            self.close("unread")
            return
        self._events.append(event)
        self._idle.clear()
        self._ready.set()

    def close(self, reason: Closing) -> None:
        """Ends the stream once what was sent before is out."""
        if self.closed is None:
            self.closed = reason
            self._ready.set()

    async def next(self) -> federation_pb2.Event | Closing:
        """The next event, or why the stream ends. Asking for it says that the last is on its way."""
        while not self._events:
            self._idle.set()
            if self.closed is not None:
                return self.closed
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    async def drained(self) -> None:
        await self._idle.wait()


class FarConnection(Connection):
    """A client's stream at a front-end, as the leader knows of it. The front-end reads in the store what the
    client must be told, so whatever is sent here goes nowhere."""

    def send(self, event: federation_pb2.Event) -> None:
        pass


class Connections:
    """The open streams by client; a client has one, the newest."""

    def __init__(
        self,
        max_clients: int,
        steady: Callable[[], float] = time.monotonic,
        kind: type[Connection] = Connection,
    ) -> None:
        self._max_clients = max_clients
        self._kind = kind
        self._steady = steady
        self._connections: dict[str, Connection] = {}
        self._started = self._returned = steady()
        self._left: dict[str, float] = {}
        """When those who are not here went away."""
        self.certificate_ends: dict[str, float] = {}
        """By client, until when the certificate is valid that it showed last; in seconds since 1970."""
        self.free_bytes: dict[str, int] = {}
        """By client, what was free on its disk when it last connected, of those that say."""
        self._names: dict[str, str] = {}
        self.changed = Bell()

    def connect(self, client: Client, answers: bool = False) -> Connection:
        """A stream for the client; an older one of the same client ends."""
        old = self._connections.get(client.client_id)
        if old is None and len(self._connections) >= self._max_clients:
            raise TooManyConnections(f"{self._max_clients} clients are connected, the most this server takes")
        if old is not None:
            old.close("replaced")
        elif client.client_id not in self._left or self.away(client.client_id) >= LONG_AWAY_SECONDS:
            self._returned = self._steady()
        self._left.pop(client.client_id, None)
        self._names[client.client_id] = client.name
        connection = self._kind(client, answers, self._steady)
        self._connections[client.client_id] = connection
        self.changed.ring()
        return connection

    def disconnect(self, connection: Connection) -> None:
        """The stream is over; one that took its place stays."""
        client_id = connection.client.client_id
        connection.close("gone")
        if self._connections.get(client_id) is connection:
            del self._connections[client_id]
            self._left[client_id] = self._steady()
            self.changed.ring()

    def get(self, client_id: str) -> Connection | None:
        return self._connections.get(client_id)

    def away(self, client_id: str) -> float:
        """Seconds since the client was last connected, more than 0; 0: it is connected.

        For one that was not here yet they count from the server's start.
        """
        if client_id in self._connections:
            return 0.0
        return max(1e-9, self._steady() - self._left.get(client_id, self._started))

    def name_of(self, client_id: str) -> str:
        """For the log; of a client that was not here since the server's start, the beginning of its id."""
        return self._names.get(client_id, client_id[:8])

    def seen_ago(self, client_id: str) -> float | None:
        """Seconds since the client was last connected; None: it was not here since the server's start."""
        if client_id in self._connections:
            return 0.0
        left = self._left.get(client_id)
        return None if left is None else self._steady() - left

    def ages(self) -> list[tuple[str, float]]:
        """Names of all that were here since the server's start, with the seconds since each was connected."""
        # A copy: others ask from threads of their own.
        names = dict(self._names)
        return [(name, self.seen_ago(client_id) or 0.0) for client_id, name in names.items()]

    def sightings(self, now: float) -> list[Sighting]:
        """Of all that were here since the server's start."""
        return [
            Sighting(
                client_id,
                now - (self.seen_ago(client_id) or 0.0),
                self.certificate_ends.get(client_id),
                self.free_bytes.get(client_id),
            )
            for client_id in self._names
        ]

    @property
    def quiet(self) -> float:
        """Seconds since a client last connected that was new or had been away for long."""
        return self._steady() - self._returned

    def connected(self) -> list[Client]:
        """Sorted by name, the order in which clients are numbered."""
        return sorted((c.client for c in self._connections.values()), key=lambda client: client.name)

    def open(self) -> list[Connection]:
        return list(self._connections.values())

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, client_id: str, event: federation_pb2.Event) -> None:
        """To the client if it is connected; else it hears of it when it is."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.send(event)

    def forget_descriptions(self) -> None:
        """What was said of a run is no longer so: it is said again with the next work."""
        for connection in self._connections.values():
            connection.described = None

    async def drain(self, seconds: float) -> None:
        """Until every event sent so far is on its way, but no longer than this."""
        waits = [asyncio.ensure_future(c.drained()) for c in self._connections.values()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
            for wait in waits:
                wait.cancel()

    def close_all(self, reason: Closing) -> None:
        for connection in self._connections.values():
            connection.close(reason)
