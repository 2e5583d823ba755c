"""Wake-ups between front-ends and the leader: PostgreSQL's LISTEN and NOTIFY.

They are hints. Whoever waits looks at the store once a second anyway, so one that is lost, because a
connection broke or a pooler does not pass it on, costs a second and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from fedmpq.server.connections import Bell

LOOK_SECONDS = 1.0
"""From one look at the store to the next without a wake-up."""
RETRY_SECONDS = 1.0
CONNECT_SECONDS = "5"
Side = Literal["leader", "fronts"]


class WakeUps:
    """Two threads with a connection each: one hears, one tells. `bell` rings in the event loop."""

    def __init__(self, url: str, hears: Side, tells: Side) -> None:
        plain = make_url(url).set(drivername="postgresql")
        if "connect_timeout" not in plain.query:
            plain = plain.update_query_dict({"connect_timeout": CONNECT_SECONDS})
        self._url = plain.render_as_string(hide_password=False)
        self._hears, self._tells = _channel(hears), _channel(tells)
        self.bell = Bell()
        self._loop = asyncio.get_running_loop()
        self._news = threading.Event()
        self._stopped = threading.Event()
        for work in (self._hear, self._tell):
            threading.Thread(target=self._again, args=(work,), daemon=True, name="wake").start()

    def tell(self) -> None:
        """The other side is to look; may be called from any thread."""
        self._news.set()

    def stop(self) -> None:
        self._stopped.set()
        self._news.set()

    async def wait(self, seen: int) -> None:
        """Until the other side has told something since the bell's count was `seen`, or for a second."""
        await self.bell.wait(seen, LOOK_SECONDS)

    def _again(self, work: object) -> None:
        assert callable(work)
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True) as connection:
                    work(connection)
            except psycopg.Error:
                self._stopped.wait(RETRY_SECONDS)

    def _hear(self, connection: psycopg.Connection) -> None:
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._hears)))
        while not self._stopped.is_set():
            if any(True for _ in connection.notifies(timeout=LOOK_SECONDS, stop_after=1)):
                self._ring()

    def _ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.bell.ring)
        except RuntimeError:
            # The loop is over, and with it whoever would have looked.
            self._stopped.set()

    def _tell(self, connection: psycopg.Connection) -> None:
        notify = sql.SQL("NOTIFY {}").format(sql.Identifier(self._tells))
        while True:
            self._news.wait()
            if self._stopped.is_set():
                return
            self._news.clear()
            connection.execute(notify)


def _channel(side: Side) -> str:
    return f"fedmpq_{side}"
