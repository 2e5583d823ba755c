"""Transactions on the database, for the parts of the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from fedmpq.server.database import writing
from fedmpq.server.store.errors import StoreFailed


class Transactions:
    """One database. SQLite and PostgreSQL both flush to disk before a transaction that wrote is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite lets one writer in and has the others sleep and try again; a lock wakes them at once.
        self._lock = threading.Lock()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with _failing(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with _failing(), self._lock, writing(self._engine) as connection:
            yield connection


@contextmanager
def _failing() -> Iterator[None]:
    """The driver's errors in the store's words."""
    try:
        yield
    except DBAPIError as error:
        raise StoreFailed(str(error)) from error
