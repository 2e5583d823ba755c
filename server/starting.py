"""What every role of a server begins with: signals, threads, and places that may be away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fedmpq.server.blobs import BlobsAway
from fedmpq.server.resources import FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS
from fedmpq.server.store.errors import StoreFailed
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

T = TypeVar("T")
DRAIN_SECONDS = 5.0
IMPATIENCE_SECONDS = 1.0
WORKERS = 4


def begin() -> asyncio.Event:
    """Threads for what blocks, and an event that a signal sets."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS, thread_name_prefix="work"))
    stopped = asyncio.Event()
    on_signals(loop, stopped)
    return stopped


async def tried(what: str, opening: Callable[[], T], stopped: asyncio.Event) -> T | None:
    """What `opening` gives once it can be reached; None if a signal comes first."""
    delay = FIRST_RETRY_SECONDS
    while True:
        try:
            return await asyncio.to_thread(opening)
        except (StoreFailed, BlobsAway) as error:
            if delay == FIRST_RETRY_SECONDS:
                say(log, f"waiting for {what}", level=logging.ERROR, error=str(error))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopped.wait(), delay)
            return None
        delay = min(2 * delay, MOST_RETRY_SECONDS)


def on_signals(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """The first SIGTERM or Ctrl-C ends the server in order; another one, from someone impatient, at once."""

    def restore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def stop() -> None:
        # Some senders signal the process and its group; both arrive together.
        if not stopped.is_set():
            loop.call_later(IMPATIENCE_SECONDS, restore)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
