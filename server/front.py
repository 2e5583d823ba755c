"""A front-end: boards connect to it, and it keeps nothing that cannot be lost.

It takes boards' streams, hands out payloads, checks what boards bring and stores it. Everything it needs it
reads in the database and among the payloads, where the leader reads what it has stored; the two never talk to
each other.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fedmpq.server.blobs import Outgoing
from fedmpq.server.boards_port import BoardsPort, boards_port
from fedmpq.server.connections import Connections
from fedmpq.server.exports import Exports
from fedmpq.server.following import Following
from fedmpq.server.leading import DEPOSED
from fedmpq.server.own_blobs import FrontBlobs, join_own_blobs
from fedmpq.server.presence import PresenceWriter
from fedmpq.server.roles import require_leader
from fedmpq.server.server_settings import ServerSettings
from fedmpq.server.shared_uploads import SharedUploads
from fedmpq.server.starting import DRAIN_SECONDS, begin, tried
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import join_store
from fedmpq.server.wake_ups import LOOK_SECONDS, WakeUps
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

ROLE_SECONDS = 5.0
"""From one look at who leads to the next."""


async def serve_front(settings: ServerSettings) -> int:
    """Serve boards until a signal; the process's exit code."""
    stopped, url = begin(), settings.state.database_url()
    async with AsyncExitStack() as stack:
        store = await tried("the database", partial(join_store, url), stopped)
        if store is None:
            return 0
        stack.callback(store.close)
        if await tried("the leader", partial(_led, store), stopped) is None:
            return 0
        opening = partial(join_own_blobs, store, settings.blobs, settings.state.blobs)
        blobs = await tried("the payloads", opening, stopped)
        if blobs is None:
            return 0
        wake_ups = WakeUps(url, hears="fronts", tells="leader")
        stack.callback(wake_ups.stop)
        return await _Front(settings, store, blobs, wake_ups, stopped).serve()


def _led(store: Store) -> bool:
    require_leader(store)
    return True


class _Front:
    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        blobs: FrontBlobs,
        wake_ups: WakeUps,
        stopped: asyncio.Event,
    ) -> None:
        state = settings.state
        self._settings = settings
        self._store = store
        self._wake_ups = wake_ups
        self._stopped = stopped
        self._following = Following(
            store,
            blobs,
            Outgoing(state.path / "outgoing"),
            Connections(settings.max_clients),
            Exports(state.path, blobs.location),
            SharedUploads(state.uploads, store, blobs),
        )
        self._well = asyncio.Event()
        self._health: list[bool] = [True]
        self._led = True

    async def serve(self) -> int:
        """Boards are let in after the first look at the run, and hear of it at once."""
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._following.follow(self._wake_ups, self._looked)),
            asyncio.ensure_future(self._stopped.wait()),
        ]
        try:
            await asyncio.wait(
                [*tasks, asyncio.ensure_future(self._well.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if not self._stopped.is_set():
                async with boards_port(self._settings, self._following) as port:
                    await self._serve_at(port, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._following.settled()
        return 0 if self._led else DEPOSED

    async def _serve_at(self, port: BoardsPort, tasks: list[asyncio.Future[Any]]) -> None:
        connections = self._following.connections
        lease = self._settings.lease_seconds
        writer = PresenceWriter(self._store, connections, uuid.uuid4().hex, port.address, lease)
        tasks += [
            asyncio.ensure_future(writer.keep(self._wake_ups.tell)),
            asyncio.ensure_future(self._keep_role()),
            asyncio.ensure_future(self._keep_health(port)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        say(log, "stopping", reason="a signal" if self._stopped.is_set() else "nobody leads front-ends")
        await connections.drain(DRAIN_SECONDS)
        await port.stop()
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        await writer.end()

    def _looked(self, well: bool) -> None:
        if well:
            self._well.set()
        self._health[0] = well

    async def _keep_health(self, port: BoardsPort) -> None:
        """A balancer that asks is told whether the database answers and the run can be followed."""
        told = True
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if told != self._health[0]:
                told = self._health[0]
                say(
                    log, "healthy" if told else "not healthy", level=logging.INFO if told else logging.WARNING
                )
                await port.tell_health(told)

    async def _keep_role(self) -> None:
        """Returns when a server leads that does not lead front-ends."""
        while True:
            await asyncio.sleep(ROLE_SECONDS)
            try:
                await asyncio.to_thread(require_leader, self._store)
            except StoreFailed as error:
                if self._store.failure:
                    # The database is away, which the store has told the log.
                    continue
                self._led = False
                say(log, "nobody leads front-ends", level=logging.ERROR, reason=str(error))
                return
