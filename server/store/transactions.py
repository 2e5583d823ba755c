"""Transactions on the database, for the parts of the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, TimeoutError

from fedmpq.server.database import one_line, writing
from fedmpq.server.store.errors import StoreFailed
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

_Kind = Literal["read", "write"]


class Transactions:
    """One database. SQLite and PostgreSQL both flush to disk before a transaction that wrote is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite lets one writer in and has the others sleep and try again; a lock wakes them at once.
        self._lock = threading.Lock()
        self._failures: dict[_Kind, str] = {}

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
        if self._failures.pop(kind, None) is not None:
            say(log, "the database answers again")
