"""Leading: of several servers on one database one does the work, and the others stand by to take over.

A lease in the database says who leads (`store.leadership`). The leader renews it three times in its length;
who stands by takes it when it is over. A leader that finds itself deposed stops: its writes are refused from
the moment another took over, and boards find the other one behind the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from fedmpq.server.store.errors import Deposed, StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

RENEWALS = 3
DEPOSED = 75
"""Exit code of a server that another has taken over from: started again, it stands by."""


def holder_of(state: Path) -> str:
    """What tells servers apart. One server runs in a folder at a time, which a lock sees to: so a lease held
    under its own name is of one that is gone, and need not be waited for."""
    return f"{socket.gethostname()}:{state.resolve()}"


class Lease:
    def __init__(self, store: Store, holder: str, seconds: float) -> None:
        self._store = store
        self._holder = holder
        self._seconds = seconds
        self._renewing: asyncio.Future[None] | None = None
        self.deposed = False
        """Another has taken over."""

    async def take(self, stopped: asyncio.Event) -> bool:
        """Waits until this server leads; False: it was told to stop before."""
        told = False
        while not stopped.is_set():
            with contextlib.suppress(StoreFailed):
                epoch = await asyncio.to_thread(self._store.lead, self._holder, self._seconds)
                if epoch is not None:
                    if told:
                        say(log, "leading", epoch=epoch)
                    return True
                leader = await asyncio.to_thread(self._store.leader)
                if not told and leader is not None:
                    told = True
                    say(log, "standing by", leader=leader.holder, epoch=leader.epoch)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped.wait(), self._seconds / RENEWALS)
        return False

    def keep(self, deposed: Callable[[], None]) -> None:
        """Renews the lease until its end, or another leads: then `deposed` is called."""
        self._renewing = asyncio.ensure_future(self._renew(deposed))

    async def end(self) -> None:
        """Leads no longer, so that who stands by need not wait."""
        if self._renewing is not None:
            self._renewing.cancel()
        if not self.deposed:
            with contextlib.suppress(StoreFailed):
                await asyncio.to_thread(self._store.step_down)

    async def _renew(self, deposed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(self._seconds / RENEWALS)
            try:
                await asyncio.to_thread(self._store.renew, self._seconds)
            except Deposed as error:
                self.deposed = True
                say(log, "deposed", level=logging.ERROR, reason=str(error))
                deposed()
                return
            except StoreFailed:
                # The store has told the log. Nobody takes over while the database is away.
                continue
