"""Lets a few transfers through at a time, so that memory does not grow with the number of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turnstile:
    """At most `limit` are inside, but for those who stay longer than `seconds`: they count no more.

    So a client that stalls holds the others up for that long and not for ever.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._free = asyncio.Semaphore(limit)
        self._seconds = seconds

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        await self._free.acquire()
        inside = True

        def leave() -> None:
            nonlocal inside
            if inside:
                inside = False
                self._free.release()

        overstayed = asyncio.get_running_loop().call_later(self._seconds, leave)
        try:
            yield
        finally:
            overstayed.cancel()
            leave()
