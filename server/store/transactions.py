"""Transactions on the database, for the parts of the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import Connection, Engine, Pool, text
from sqlalchemy.exc import DBAPIError, TimeoutError

from fedmpq.server.database import one_line, writing
from fedmpq.server.store.errors import Deposed, StoreFailed
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

PAUSED_SECONDS = 15
"""A transaction that stands still for so long in PostgreSQL is rolled back: its process may have been paused,
and another that wants to take over waits for it."""
_PATIENCE = f"set_config('idle_in_transaction_session_timeout', '{PAUSED_SECONDS}s', true)"
_FENCE = {
    "sqlite": text("SELECT epoch FROM leadership"),
    "postgresql": text(f"SELECT epoch, {_PATIENCE} FROM leadership FOR SHARE"),
}
_Kind = Literal["read", "write"]


class Transactions:
    """One database. SQLite and PostgreSQL both flush to disk before a transaction that wrote is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.epoch: int | None = None
        """Under which this store's server leads; None: it writes whoever leads, as the commands do."""
        self.wrote: Callable[[], None] | None = None
        """Called after a transaction of the leader's, or of a command's: others may want to look."""
        # SQLite lets one writer in and has the others sleep and try again; a lock wakes them at once.
        self._lock = threading.Lock()
        self._failures: dict[_Kind, str] = {}
        self._closed: Pool | None = None

    def close(self) -> None:
        """Ends all connections; that of a transaction which is under way in another thread ends with it."""
        self._closed = self._engine.pool
        self._engine.dispose()

    @property
    def failure(self) -> str:
        """What the database fails with now; empty: nothing."""
        return next(iter(self._failures.values()), "")

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._failing("read"), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """A transaction that is refused where another server leads by now."""
        with self._unfenced_write() as connection:
            if self.epoch is not None:
                _require_epoch(connection, self.epoch)
            else:
                _bound_pauses(connection)
            yield connection
        if self.wrote is not None:
            self.wrote()

    @contextmanager
    def _own_write(self) -> Iterator[Connection]:
        """A transaction that is taken whoever leads: a front-end's own, or one about the lease itself."""
        with self._unfenced_write() as connection:
            _bound_pauses(connection)
            yield connection

    @contextmanager
    def _unfenced_write(self) -> Iterator[Connection]:
        with self._failing("write"), self._lock, writing(self._engine) as connection:
            yield connection

    @contextmanager
    def _failing(self, kind: _Kind) -> Iterator[None]:
        """The driver's errors in the store's words. The log has one line when they begin and one when they
        end; reading may work where writing does not."""
        try:
            yield
        except (DBAPIError, TimeoutError) as error:
            failure = f"the database fails: {one_line(error)}"
            if kind not in self._failures:
                say(log, "the database fails; trying again", level=logging.ERROR, error=one_line(error))
            self._failures[kind] = failure
            raise StoreFailed(failure) from error
        finally:
            if self._closed is not None:
                # Its connection went back to the pool of before, or to a new one; nobody empties them else.
                self._closed.dispose()
                self._engine.dispose()
        if self._failures.pop(kind, None) is not None:
            say(log, "the database answers again")


def _bound_pauses(connection: Connection) -> None:
    """As the fence does it for a leader."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT {_PATIENCE}"))


def _require_epoch(connection: Connection, epoch: int) -> None:
    """The row stays as it is until the transaction is over; in SQLite there is one writer anyway."""
    if connection.execute(_FENCE[connection.dialect.name]).scalar() != epoch:
        raise Deposed(epoch)
