"""An upload on its way in: in memory while it is short and comes quickly, in its file otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from fedmpq.server.accepting import SMALL_BYTES
from fedmpq.server.blobs import Uploads

HELD_BYTES = 16 << 20
"""Of all uploads together, so much waits in memory; what comes beyond goes to files."""
QUICK_SECONDS = 0.5
"""What is not whole after so long goes to its file, where the next call finds it."""


class Memory:
    """What the uploads of all clients hold."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self.held = 0

    def take(self, count: int) -> bool:
        """Whether there is room for so many bytes, which are counted then."""
        if self.held + count > self._most:
            return False
        self.held += count
        return True

    def give_back(self, count: int) -> None:
        self.held -= count


class Incoming:
    """One upload of a client, from the byte `at` on, of which a file may have what came before."""

    def __init__(self, uploads: Uploads, memory: Memory, client_id: str, name: bytes, at: int) -> None:
        self._uploads = uploads
        self._memory = memory
        self._client_id = client_id
        self._name = name
        self.at = at
        """Bytes that have arrived, wherever they are now."""
        self._filed = at
        self._has_file = False
        self._data = bytearray()
        # Others may ask for what has arrived while it is being written.
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """A file for it; what is stored of other uploads of the client, or of this one beyond its offset, is
        removed."""
        await asyncio.to_thread(self._uploads.begin, self._client_id, self._name, self._filed)
        self._has_file = True

    async def add(self, data: bytes) -> None:
        """Raises FileNotFoundError if the file was removed: its round is over."""
        async with self._lock:
            self.at += len(data)
            if len(self._data) + len(data) <= SMALL_BYTES and self._memory.take(len(data)):
                self._data += data
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(QUICK_SECONDS, self._keep_late)
                return
            await self._keep()
            await self._write(data)

    async def keep(self) -> None:
        """What is in memory goes to where the next call finds it."""
        async with self._lock:
            await self._keep()
            if self._has_file:
                await asyncio.to_thread(self._uploads.settle, self._client_id, self._name)

    async def _keep(self) -> None:
        """What is in memory goes to the file."""
        if self._data:
            data = bytes(self._data)
            self.release()
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        if not self._has_file:
            await self.begin()
        await asyncio.to_thread(self._uploads.write, self._client_id, self._name, self._filed, data)
        self._filed += len(data)

    def _keep_late(self) -> None:
        self._late = asyncio.ensure_future(self.keep_what_can_be())

    async def whole(self) -> Path | bytes:
        """An upload that has arrived: its file, or its bytes if none of it is in a file."""
        self._stop_timer()
        async with self._lock:
            if not self._has_file:
                return bytes(self._data)
            await self._keep()
        return self._uploads.path(self._client_id, self._name)

    async def drop(self) -> None:
        """It is needed no more."""
        self._stop_timer()
        self.release()
        if self._has_file:
            await asyncio.to_thread(self._uploads.drop, self._client_id, self._name)

    async def keep_what_can_be(self) -> None:
        """For the next call, which sends from there on; what a disk does not take is sent again."""
        self._stop_timer()
        with contextlib.suppress(OSError):
            await self.keep()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def release(self) -> None:
        """What is in memory is let go."""
        self._memory.give_back(len(self._data))
        self._data = bytearray()
