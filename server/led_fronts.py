"""What a leader has in place of the boards' port: a copy of what its front-ends know, kept up by looking."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fedmpq.server.connections import Connections, FarConnection
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.pace import Pace
from fedmpq.server.presence import PresenceReader
from fedmpq.server.read_ahead import ReadAhead
from fedmpq.server.server_settings import ServerSettings
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.wake_ups import WakeUps
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


def far_connections() -> Connections:
    """As many as the front-ends have; each of them bounds its own."""
    return Connections(sys.maxsize, kind=FarConnection)


class LedFronts:
    """The front-ends of one leader."""

    def __init__(self, coordinator: Coordinator, wake_ups: WakeUps) -> None:
        self._coordinator = coordinator
        self._wake_ups = wake_ups
        self._reader = PresenceReader(coordinator.store, coordinator.connections)
        self._following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        pace = Pace(share=4.0)
        while True:
            seen = self._wake_ups.bell.count
            pace.begin()
            try:
                await self.look()
            except StoreFailed:
                # The store has told the log.
                pass
            except Exception:
                log.exception("a look at the front-ends failed")
            pace.end()
            await self._wake_ups.wait(seen)
            await pace.rest()

    async def look(self) -> None:
        """Which boards are there, and who has answered the open round, at whichever front-end."""
        await self._reader.look()
        current = self._coordinator.round
        if current is None:
            return
        read = partial(self._coordinator.store.current_round, current.address.run_id)
        if changed := await current.refresh(read):
            if isinstance(blobs := self._coordinator.blobs, ReadAhead):
                come = [new.answer.payload for _, new in changed if new.answer is not None]
                blobs.expect(come, current.work.hold)
            self._coordinator.connections.changed.ring()

    async def stop(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)


@asynccontextmanager
async def led_fronts(settings: ServerSettings, coordinator: Coordinator) -> AsyncIterator[LedFronts]:
    """The front-ends, followed."""
    wake_ups = WakeUps(settings.state.database_url(), hears="leader", tells="fronts")
    coordinator.store.wrote = wake_ups.tell
    fronts = LedFronts(coordinator, wake_ups)
    say(log, "leading front-ends")
    try:
        yield fronts
    finally:
        await fronts.stop()
        coordinator.store.wrote = None
        wake_ups.stop()
