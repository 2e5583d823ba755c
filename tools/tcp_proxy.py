"""A TCP proxy between boards and a server: counts bytes, cuts connections, stalls them."""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_right
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

CHUNK = 1 << 14
P = TypeVar("P", bound="Proxy")


class Passed(NamedTuple):
    """Bytes that have passed by a moment of `time.monotonic`, from boards and to them."""

    moment: float
    up: int
    down: int


class Proxy:
    """Forwards 127.0.0.1:`port` to a target on loopback; a context manager that runs its own thread.

    `accepted` counts connections, stalled ones too.
    `cut_every`: connections are closed in the middle once so many bytes passed since the last cut.
    `rate`: bytes a second in each direction, to make a transfer last.
    """

    def __init__(self, target: int, cut_every: int | None = None, rate: float | None = None) -> None:
        self.target = target
        self.cut_every = cut_every
        self.rate = rate
        self.up = 0
        self.down = 0
        self.cuts = 0
        self.accepted = 0
        self.port = 0
        self._history = [Passed(0.0, 0, 0)]
        self._since_cut = 0
        self._flowing = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self: P) -> P:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def total(self) -> int:
        return self.up + self.down

    def passed(self, moment: float) -> Passed:
        """What had passed by then: a process that tells when it did something need not be watched."""
        return self._history[bisect_right(self._history, moment, key=lambda entry: entry.moment) - 1]

    def cut(self) -> None:
        """Close every connection there is."""
        self._run(self._cut())

    def stall(self, stalled: bool) -> None:
        """Keep connections open and pass nothing on, or go on."""
        self._loop.call_soon_threadsafe(self._flowing.clear if stalled else self._flowing.set)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        self._flowing.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._since_cut = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            out_reader, out_writer = await self._reach()
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, out_writer}
        try:
            await asyncio.gather(
                self._pump(reader, out_writer, up=True), self._pump(out_reader, writer, up=False)
            )
        finally:
            self._writers -= {writer, out_writer}

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Where the next connection goes to; an OSError closes it."""
        return await asyncio.open_connection("127.0.0.1", self.target)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                self._count(len(data), up)
                if self.cut_every is not None and self._since_cut >= self.cut_every:
                    self.cuts += 1
                    # Half of what was read still arrives: a cut falls anywhere in a message.
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    await self._cut()
                    return
                writer.write(data)
                await writer.drain()
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    def _count(self, size: int, up: bool) -> None:
        self._since_cut += size
        if up:
            self.up += size
        else:
            self.down += size
        self._history.append(Passed(time.monotonic(), self.up, self.down))
