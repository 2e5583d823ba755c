"""Who was connected when, kept in the store so that a restart does not forget it.

Many boards may come and go at once, and none of it is worth a transaction of its own: what has changed is
noted together every `NOTE_SECONDS` and when the server stops. After a crash the store knows of a board that
was connected no more than `FRESH_SECONDS` too little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fedmpq.server.connections import Connections
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Sighting

NOTE_SECONDS = 60.0
FRESH_SECONDS = 600.0
_SAME_SECONDS = 1.0
"""Two clocks tell when a client left; they differ by less."""


class SightingKeeper:
    def __init__(self, store: Store, connections: Connections, clock: Callable[[], float]) -> None:
        self._store = store
        self._connections = connections
        self._clock = clock
        self._noted: dict[str, Sighting] = {}

    async def keep(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            await self.note()

    async def note(self) -> None:
        """What is new since the last time; a database that fails is asked again the next time."""
        new = [one for one in self._connections.sightings(self._clock()) if self._is_news(one)]
        if not new:
            return
        try:
            await asyncio.to_thread(self._store.note_sightings, new)
        except StoreFailed:
            # The store has told the log.
            return
        self._noted |= {one.client_id: one for one in new}

    def _is_news(self, one: Sighting) -> bool:
        noted = self._noted.get(one.client_id)
        if noted is None or (noted.certificate_ends, noted.free_bytes) != (
            one.certificate_ends,
            one.free_bytes,
        ):
            return True
        here = self._connections.get(one.client_id) is not None
        return one.last_seen - noted.last_seen > (FRESH_SECONDS if here else _SAME_SECONDS)
