"""Lets a few transfers through at a time, so that memory does not grow with the number of clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TransferLimit:
    """At most `limit` are inside, but for those who stay longer than `seconds`: they count no more.

    So a client that stalls holds the others up for that long and not for ever. Uploads go before downloads:
    every download ends in an upload, and who has waited with one has its bytes in the server's buffers.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._free = limit
        self._seconds = seconds
        self._uploads: deque[asyncio.Future[None]] = deque()
        self._downloads: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self, *, upload: bool) -> AsyncIterator[None]:
        await self._enter(self._uploads if upload else self._downloads)
        inside = True

        def leave() -> None:
            nonlocal inside
            if inside:
                inside = False
                self._leave()

        overstayed = asyncio.get_running_loop().call_later(self._seconds, leave)
        try:
            yield
        finally:
            overstayed.cancel()
            leave()

    async def _enter(self, queue: deque[asyncio.Future[None]]) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was let in at the moment it gave up.
                self._leave()
            raise

    def _leave(self) -> None:
        for queue in (self._uploads, self._downloads):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1
